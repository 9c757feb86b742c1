// The strip of numbers at the top. Owns its elements.

import { count, duration, make, percent, rate, say } from "/format.js";

const FIGURES = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["first_token", "First token"],
  ["between_tokens", "Between tokens"],
  ["output_rate", "Output tokens"],
  ["prompt_rate", "Prompt tokens"],
  ["kv", "KV blocks used"],
  ["hits", "Prefix hits"],
  ["preemptions", "Preemptions"],
];

export class Figures {
  constructor(list) {
    this.parts = new Map();
    for (const [name, title] of FIGURES) {
      const value = make("span", { "data-field": name });
      const note = make("small", { "data-field": `${name}_note` });
      list.append(make("div", {}, make("dt", {}, title), make("dd", {}, value, note)));
      this.parts.set(name, { value, note });
    }
  }

  set(name, value, note = "") {
    say(this.parts.get(name).value, value);
    say(this.parts.get(name).note, note);
  }

  draw(state) {
    const { totals, counters } = state;
    this.set("running", count(totals.running_requests ?? 0));
    this.set("waiting", count(totals.waiting_requests ?? 0), totals.waiting_tokens ? `${count(totals.waiting_tokens)} tokens` : "");
    const workers = [...state.workers.values()];
    const used = workers.reduce((sum, worker) => sum + worker.blocks_used, 0);
    const total = workers.reduce((sum, worker) => sum + worker.blocks_total, 0);
    this.set("kv", total ? percent(used / total) : "–", total ? `${count(used)} of ${count(total)}` : "");
    const asked = counters.prefix_queried_tokens;
    this.set("hits", asked ? percent(counters.prefix_hit_tokens / asked) : "–", asked ? `of ${count(asked)} tokens` : "");
    this.set("preemptions", count(counters.preemptions ?? 0), counters.requests_moved ? `${count(counters.requests_moved)} moved` : "");
  }

  drawLatency(answer) {
    const { recent, recent_seconds: seconds } = answer;
    for (const [name, columns] of [["first_token", recent.time_to_first_token], ["between_tokens", recent.between_tokens]]) {
      if (columns?.counts[0]) this.set(name, duration(columns.p50_ms[0]), `95 % in ${duration(columns.p95_ms[0])}`);
      else this.set(name, "–");
    }
    this.set("output_rate", rate((recent.output_tokens[0] ?? 0) / seconds), "a second");
    this.set("prompt_rate", rate((recent.prefill_tokens[0] ?? 0) / seconds), "a second");
  }
}
