// Queues and workers as tables, and why the head of each queue waits.

import { WORKER_STATUS, count, make } from "/format.js";

export function drawQueues(tables, heads, state) {
  const queues = [...state.queues.values()].sort((a, b) => a.priority - b.priority || (a.tenant < b.tenant ? -1 : 1));
  const rows = queues.map((queue) => [
    [queue.tenant],
    [String(queue.priority), "n"],
    [count(queue.waiting_requests), "n"],
    [count(queue.preempted_requests), "n"],
    [count(queue.running_requests), "n"],
    [count(queue.waiting_tokens), "n"],
  ]);
  const titles = [["tenant"], ["prio", "n"], ["waiting", "n"], ["preempted", "n"], ["running", "n"], ["tokens", "n"]];
  tables.replaceChildren(rows.length ? table(titles, rows) : make("p", { class: "empty" }, "No request is live."));
  const waiting = [...state.heads.values()].filter((head) => head.request_id);
  heads.replaceChildren(...waiting.map(headOf));
}

function headOf(head) {
  const reasons = head.blockers.map((blocker) => make("li", {}, blocker.text));
  return make("div", { class: "why", "data-head": head.model }, make("b", {}, head.request_id), ` is next for ${head.model}`, make("ul", {}, ...reasons));
}

export function drawWorkers(container, state) {
  const workers = [...state.workers.values()];
  const anyHost = workers.some((worker) => worker.host_blocks_total); // in host memory, for preempted requests
  const rows = workers.map((worker) => [
    [worker.worker_id, "name"],
    [make("span", { class: `status ${WORKER_STATUS[worker.status]}` }, WORKER_STATUS[worker.status])],
    [`${count(worker.running_requests)} of ${count(worker.num_slots)}`, "n"],
    [`${count(worker.blocks_used)} of ${count(worker.blocks_total)}`, "n"],
    ...(anyHost ? [[worker.host_blocks_total ? `${count(worker.host_blocks_used)} of ${count(worker.host_blocks_total)}` : "", "n"]] : []),
  ]);
  const titles = [["worker"], ["status"], ["requests", "n"], ["blocks", "n"], ...(anyHost ? [["host blocks", "n"]] : [])];
  const parts = [rows.length ? table(titles, rows) : make("p", { class: "empty" }, "No worker has registered.")];
  for (const worker of workers) {
    if (worker.last_error && worker.status === 1) parts.push(make("p", { class: "why" }, `${worker.worker_id}: ${worker.last_error}`));
  }
  container.replaceChildren(...parts);
}

function table(titles, rows) {
  const cell = (tag) => ([content, kind]) => make(tag, { class: kind, title: kind === "name" ? content : null }, content);
  const body = rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
  return make("table", {}, make("thead", {}, make("tr", {}, ...titles.map(cell("th")))), make("tbody", {}, ...body));
}
