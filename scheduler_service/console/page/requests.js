// The list of live requests. Only the rows in sight are in the page, however many there are.

import { STATUS, age, count, make, say } from "/format.js";

const ROW = 28;
const COLUMNS = [
  ["name", "Request", (r) => r.name],
  ["status", "Status", (r) => [r.status !== 2, r.status, r.key]],
  ["tenant", "Tenant", (r) => [r.tenant, r.priority, r.key]],
  ["priority", "Priority", (r) => [r.priority, r.key], true],
  ["progress", "Progress", (r) => -progress(r).share],
  ["prompt_tokens", "Prompt", (r) => -r.prompt_tokens, true],
  ["output_tokens", "Output", (r) => -r.output_tokens, true],
  ["blocks", "Blocks", (r) => -r.blocks, true],
  ["preemptions", "Preempted", (r) => -r.preemptions, true],
  ["worker_id", "Worker", (r) => [r.worker_id, r.key]],
  ["age", "Age", (r) => r.born, true],
];

export class Requests {
  /** `open` is called with the name of a request. */
  constructor(grid, filter, note, open) {
    Object.assign(this, { grid, note, open });
    this.sorted = "age";
    this.filter = "";
    this.live = [];
    this.active = 0; // place of the row that keys have reached
    this.selected = null; // name of the request that is shown
    this.buttons = COLUMNS.map((column) => this.newTitle(column));
    const titles = make("div", { class: "row titles", role: "row" }, ...this.buttons.map(({ cell }) => cell));
    this.rows = make("div", { class: "rows", role: "rowgroup" });
    grid.append(titles, this.rows);
    grid.addEventListener("scroll", () => this.paint());
    grid.addEventListener("keydown", (event) => this.onKey(event));
    filter.addEventListener("input", () => {
      this.filter = filter.value.trim().toLowerCase();
      this.draw(this.state);
    });
    this.pool = [];
  }

  newTitle([name, title, , isNumber]) {
    const button = make("button", { type: "button", class: "sort", tabindex: "-1" }, title);
    button.addEventListener("click", () => {
      this.sorted = name;
      this.draw(this.state);
    });
    return { name, button, cell: make("span", { role: "columnheader", class: isNumber ? "n" : "" }, button) };
  }

  draw(state) {
    if (!state) return;
    this.state = state;
    const order = COLUMNS.find(([name]) => name === this.sorted)[2];
    const wanted = this.filter
      ? [...state.requests.values()].filter((r) => `${r.name} ${r.tenant} ${r.worker_id} ${STATUS[r.status]}`.toLowerCase().includes(this.filter))
      : [...state.requests.values()];
    const keyed = wanted.map((request) => [order(request), request]);
    keyed.sort(([a, x], [b, y]) => compare(a, b) || x.key - y.key);
    this.live = keyed.map(([, request]) => request);
    for (const { name, button } of this.buttons) button.setAttribute("aria-pressed", String(name === this.sorted));
    const hidden = state.totals.hidden_requests;
    say(this.note, `${count(this.live.length)}${this.filter ? ` of ${count(state.requests.size)}` : ""} live${hidden ? `, ${count(hidden)} more not listed` : ""}`);
    this.grid.setAttribute("aria-rowcount", String(this.live.length + 1));
    this.rows.style.height = `${Math.max(1, this.live.length) * ROW}px`;
    this.active = Math.min(this.active, Math.max(0, this.live.length - 1));
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.grid.scrollTop / ROW) - 2);
    const last = Math.min(this.live.length, first + Math.ceil(this.grid.clientHeight / ROW) + 4);
    while (this.pool.length < last - first) this.pool.push(this.newRow());
    this.pool.forEach((row, i) => {
      const request = first + i < last ? this.live[first + i] : null;
      row.element.hidden = !request;
      if (request) this.fill(row, request, first + i);
    });
    const active = this.pool.find((row) => !row.element.hidden && row.place === this.active);
    if (active) this.grid.setAttribute("aria-activedescendant", active.element.id);
  }

  newRow() {
    const cells = COLUMNS.map(([name, , , isNumber]) => make("span", { role: "gridcell", class: isNumber ? "n" : "", "data-field": name }));
    const bar = make("i");
    cells[4].append(make("div", { class: "meter" }, bar));
    const status = make("span");
    cells[1].append(status);
    const element = make("div", { class: "row", role: "row", id: `row-${this.pool.length}` }, ...cells);
    const row = { element, cells, bar, status, place: 0 };
    element.addEventListener("click", () => {
      this.active = row.place;
      this.choose();
    });
    this.rows.append(element);
    return row;
  }

  fill(row, request, place) {
    row.place = place;
    const { element, cells } = row;
    element.style.transform = `translateY(${place * ROW}px)`;
    element.dataset.key = request.key;
    element.setAttribute("aria-rowindex", String(place + 2));
    element.setAttribute("aria-selected", String(request.request_id === this.selected));
    element.classList.toggle("active", place === this.active);
    row.status.className = `status ${STATUS[request.status]}`;
    say(row.status, STATUS[request.status]);
    const { share, text, isPrefill } = progress(request);
    row.bar.style.width = `${share * 100}%`;
    row.bar.className = isPrefill ? "prefill" : "";
    cells[4].setAttribute("aria-label", text);
    cells[4].title = text;
    const texts = { 0: request.name, 2: request.tenant, 3: String(request.priority), 5: count(request.prompt_tokens), 6: count(request.output_tokens), 7: count(request.blocks), 8: count(request.preemptions), 9: request.worker_id, 10: age(this.state.totals.time_seconds - request.born) };
    for (const [index, value] of Object.entries(texts)) say(cells[index], value);
    cells[0].title = request.name;
  }

  onKey(event) {
    const page = Math.floor(this.grid.clientHeight / ROW) - 2;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (by) {
      event.preventDefault();
      this.active = Math.min(this.live.length - 1, Math.max(0, this.active + by));
      const top = this.active * ROW;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      const over = top + 2 * ROW - this.grid.clientHeight;
      if (over > this.grid.scrollTop) this.grid.scrollTop = over;
      this.paint();
    } else if (event.key === "Enter" && event.target === this.grid) {
      this.choose();
    }
  }

  choose() {
    const request = this.live[this.active];
    if (request) this.open(request.request_id);
  }

  select(name) {
    this.selected = name;
    this.paint();
  }
}

/** Of the prompt while that is computed, then of the most tokens that it may have. */
function progress(request) {
  if (request.status !== 2) return { share: 0, text: "not running", isPrefill: false };
  if (request.computed_tokens < request.prompt_tokens) {
    const text = `${request.computed_tokens} of ${request.prompt_tokens} prompt tokens`;
    return { share: request.computed_tokens / request.prompt_tokens, text, isPrefill: true };
  }
  const share = request.max_tokens ? Math.min(1, request.output_tokens / request.max_tokens) : 0;
  return { share, text: `${request.output_tokens} of at most ${request.max_tokens} tokens`, isPrefill: false };
}

function compare(a, b) {
  if (!Array.isArray(a)) return a < b ? -1 : a > b ? 1 : 0;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i] ? -1 : 1;
  return 0;
}
