// One request: where it stands, why it waits, and its waterfall.

import { STATUS, age, count, duration, make } from "/format.js";
import { waterfall } from "/waterfall.js";

const MOST_ROWS = 10;

export class Detail {
  constructor(body) {
    this.body = body;
    this.name = null;
  }

  /** Shows a request, and follows it until it has ended. */
  async open(name) {
    this.name = name;
    await this.load();
  }

  async load() {
    const name = this.name;
    if (name === null || this.ended === name) return;
    const answer = await fetch(`/api/request?id=${encodeURIComponent(name)}`);
    if (name !== this.name) return;
    if (!answer.ok) {
      this.body.replaceChildren(make("p", { class: "empty" }, `Nothing is known of ${name} any more.`));
      return;
    }
    const { candidates } = await answer.json();
    if (candidates.every((candidate) => candidate.finish_reason)) this.ended = name;
    this.body.replaceChildren(...candidates.map(picture));
  }
}

function picture(candidate) {
  const { state } = candidate;
  const fall = waterfall(candidate);
  const end = candidate.finish_reason ? `: ${candidate.finish_reason}` : "";
  const where = state.worker_id ? ` on ${state.worker_id}` : "";
  return make(
    "article",
    { "data-request": state.request_id },
    make("h3", { class: "title" }, state.index ? `${state.request_id}/${state.index}` : state.request_id),
    make("p", { class: "subtitle" }, make("span", { class: `status ${STATUS[state.status]}`, "data-field": "status" }, `${STATUS[state.status]}${end}`), where),
    facts(candidate, fall),
    bars(fall),
    why(candidate),
    timeline(candidate),
  );
}

function facts(candidate, fall) {
  const { state } = candidate;
  const rows = [
    ["Tenant", state.tenant],
    ["Priority", String(state.priority)],
    ["Prompt", count(state.prompt_tokens)],
    ["Output", `${count(state.output_tokens)} of ${count(state.max_tokens)}`],
    ["Blocks", count(state.blocks)],
    ["Preempted", count(state.preemptions)],
    ["First token", fall.firstToken === null ? "–" : duration(fall.firstToken * 1000)],
    ["Between tokens", fall.betweenTokens === null ? "–" : duration(fall.betweenTokens * 1000)],
  ];
  if (candidate.position !== null) rows.push(["Ahead of it", count(candidate.position - 1)]);
  if (candidate.estimated_start_seconds !== null) rows.push(["Runs in about", age(candidate.estimated_start_seconds)]);
  return make("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function bars(fall) {
  const label = fall.phases.map((phase) => `${phase.name} ${duration((phase.end - phase.start) * 1000)}`).join(", ");
  const whole = make("div", { class: "track whole" }, ...fall.phases.map((phase) => piece(phase, fall.total, phase.name)));
  const rows = fall.phases.slice(0, MOST_ROWS).map((phase) => bar(phase, fall.total));
  const left = fall.phases.length - rows.length;
  const more = left > 0 ? make("p", { class: "more" }, `and ${left} more phases, in the bar above`) : null;
  return make("div", { class: "fall", role: "img", "aria-label": `Waterfall: ${label}` }, whole, ...rows, more);
}

function piece(phase, total, name) {
  const fill = make("i", { class: name });
  fill.style.left = share(phase.start, total);
  fill.style.width = share(phase.end - phase.start, total);
  return fill;
}

function share(seconds, total) {
  return `${total > 0 ? (seconds / total) * 100 : 0}%`;
}

function bar(phase, total) {
  const cuts = phase.chunks.slice(1).map((chunk) => {
    const cut = make("i", { class: "cut" });
    cut.style.left = share(chunk.at, total);
    return cut;
  });
  const steps = phase.firstStep ? `steps ${phase.firstStep}${phase.lastStep > phase.firstStep ? ` to ${phase.lastStep}` : ""}` : "";
  const chunks = phase.chunks.length > 1 ? `${phase.chunks.length} chunks` : "";
  const title = [phase.worker, steps, chunks, phase.detail].filter(Boolean).join(", ");
  return make(
    "div",
    { class: `bar-row ${phase.name}`, title, "data-phase": phase.name },
    make("span", {}, phase.name),
    make("span", { class: "track" }, piece(phase, total), ...cuts),
    make("span", { class: "n" }, duration((phase.end - phase.start) * 1000)),
  );
}

function why(candidate) {
  if (!candidate.blockers.length) return null;
  const reasons = candidate.blockers.map((blocker) => make("li", {}, blocker.text));
  return make("div", { class: "why" }, make("b", {}, "Why it waits"), make("ul", {}, ...reasons));
}

function timeline(candidate) {
  const rows = candidate.timeline.map((entry) =>
    make("tr", {}, make("td", { class: "n" }, `${entry.at_seconds.toFixed(3)} s`), make("td", {}, entry.event.replace("_", " ")), make("td", {}, [entry.worker_id, entry.detail].filter(Boolean).join(": "))),
  );
  const titles = make("tr", {}, make("th", { class: "n" }, "at"), make("th", {}, "what"), make("th", {}, "where and why"));
  const table = make("table", { "data-field": "timeline" }, make("thead", {}, titles), make("tbody", {}, ...rows));
  return make("div", { class: "moments", tabindex: "0", "aria-label": "Timeline" }, table);
}
