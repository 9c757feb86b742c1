// One worker's KV blocks as a map: who holds each, what is cached, what is free.

import { count, make, say, surface, theme } from "/format.js";

const AREA_HEIGHT = 300;
const MOST_CELL = 15;
const LEAST_CELL = 4;

export class Blocks {
  /** `open` is called with the name of a request. */
  constructor(canvas, tabs, counts, reading, open) {
    Object.assign(this, { canvas, tabs, counts, reading, open });
    this.worker = null;
    this.map = null;
    this.at = null;
    this.selected = null; // key of a request
    canvas.addEventListener("pointermove", (event) => this.read(this.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.read(null));
    canvas.addEventListener("click", (event) => this.openAt(this.blockAt(event)));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  drawTabs(state) {
    const ids = [...state.workers.values()].filter((worker) => worker.status > 1).map((worker) => worker.worker_id);
    if (!ids.includes(this.worker)) {
      this.worker = ids[0] ?? null;
      this.map = null;
    }
    if (this.tabs.dataset.ids !== JSON.stringify(ids)) {
      this.tabs.dataset.ids = JSON.stringify(ids);
      this.tabs.replaceChildren(...ids.map((id) => this.newTab(id)));
    }
    for (const tab of this.tabs.children) tab.setAttribute("aria-selected", String(tab.textContent === this.worker));
  }

  newTab(id) {
    const tab = make("button", { type: "button", role: "tab" }, id);
    tab.addEventListener("click", () => {
      this.worker = id;
      this.load();
    });
    return tab;
  }

  async load() {
    const worker = this.worker;
    if (worker === null) return this.show(null);
    const answer = await fetch(`/api/blocks?worker=${encodeURIComponent(worker)}`);
    if (worker === this.worker) this.show(answer.ok ? await answer.json() : null);
  }

  show(answer) {
    if (!answer) {
      this.map = null;
      say(this.counts, "");
      surface(this.canvas, 1, 1);
      return;
    }
    const owners = new Int32Array(bytes(answer.owner_indices).buffer);
    this.map = { holders: bytes(answer.holders), cached: bytes(answer.cached), owners, requests: answer.owners, blockSize: answer.block_size };
    const { holders, cached } = this.map;
    let used = 0, shared = 0, reusable = 0;
    for (let id = 1; id < holders.length; id++) {
      if (holders[id]) used += 1;
      if (holders[id] > 1) shared += 1;
      if (!holders[id] && cached[id]) reusable += 1;
    }
    const free = holders.length - 1 - used - reusable;
    this.counts.replaceChildren(
      ...piece("used", `${count(used)} used, colour by request`),
      ...piece("shared", `${count(shared)} shared`),
      ...piece("cached", `${count(reusable)} cached`),
      ...piece("free", `${count(free)} free`),
    );
    Object.assign(this.counts.dataset, { used, shared, cached: reusable, free });
    this.canvas.setAttribute("aria-label", `KV blocks of ${this.worker}: ${used} used, ${shared} of them shared, ${reusable} cached, ${free} free. Arrow keys move, Enter opens the request that holds the block.`);
    this.paint();
    if (this.at !== null) this.read(this.at);
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth;
    const blocks = this.map.holders.length - 1;
    let cell = MOST_CELL;
    while (cell > LEAST_CELL && Math.ceil(blocks / Math.floor(width / cell)) * cell > AREA_HEIGHT) cell -= 1;
    const columns = Math.max(1, Math.floor(width / cell));
    return { blocks, cell, columns, rows: Math.ceil(blocks / columns) };
  }

  paint() {
    if (!this.map || !this.canvas.parentElement.clientWidth) return;
    const { blocks, cell, columns, rows } = this.layout();
    this.canvas.style.width = `${columns * cell}px`;
    this.canvas.style.height = `${rows * cell}px`;
    const context = surface(this.canvas, columns * cell, rows * cell);
    const { holders, cached, owners, requests } = this.map;
    const colors = requests.map((request) => colorOf(request.key));
    const lit = this.litOwner();
    const gap = cell > 6 ? 2 : 1;
    for (let id = 1; id <= blocks; id++) {
      const x = ((id - 1) % columns) * cell;
      const y = Math.floor((id - 1) / columns) * cell;
      const owner = owners[id];
      context.globalAlpha = lit !== null && owner !== lit ? 0.3 : 1;
      context.fillStyle = holders[id] ? colors[owner] ?? theme.quiet : cached[id] ? theme.cached : theme.free;
      context.fillRect(x, y, cell - gap, cell - gap);
      if (holders[id] > 1 && cell > 5) {
        context.fillStyle = theme.paper;
        context.beginPath();
        context.arc(x + (cell - gap) / 2, y + (cell - gap) / 2, cell / 6, 0, 7);
        context.fill();
      }
    }
    context.globalAlpha = 1;
    if (this.at !== null && this.at <= blocks) {
      context.strokeStyle = theme.ink;
      context.lineWidth = 1.5;
      context.strokeRect(((this.at - 1) % columns) * cell - 0.5, Math.floor((this.at - 1) / columns) * cell - 0.5, cell - gap + 1, cell - gap + 1);
    }
  }

  /** Place among the owners of the request whose blocks stand out. */
  litOwner() {
    const { owners, requests, holders } = this.map;
    if (this.at !== null && holders[this.at]) return owners[this.at];
    const place = requests.findIndex((request) => request.key === this.selected);
    return place < 0 ? null : place;
  }

  select(key) {
    this.selected = key;
    this.paint();
  }

  blockAt(event) {
    if (!this.map) return null;
    const { blocks, cell, columns } = this.layout();
    const column = Math.floor(event.offsetX / cell);
    const id = Math.floor(event.offsetY / cell) * columns + column + 1;
    return column < columns && id <= blocks ? id : null;
  }

  read(id) {
    this.at = id;
    say(this.reading, id === null || !this.map ? "Point at a block, or focus the map and use the arrow keys." : this.describe(id));
    this.paint();
  }

  describe(id) {
    const { holders, cached, owners, requests } = this.map;
    const prefix = cached[id] ? ", its prefix can be hit" : "";
    if (!holders[id]) return cached[id] ? `Block ${id}: cached${prefix}` : `Block ${id}: free`;
    const owner = requests[owners[id]];
    const name = owner ? (owner.index ? `${owner.request_id}/${owner.index}` : owner.request_id) : "a request that has just left";
    const others = holders[id] > 1 ? ` and ${holders[id] - 1} more` : "";
    const tenant = owner ? `, tenant ${owner.tenant}, ${count(owner.blocks)} blocks in all` : "";
    return `Block ${id}: held by ${name}${others}${tenant}${prefix}`;
  }

  onKey(event) {
    if (!this.map) return;
    const { blocks, columns } = this.layout();
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (by) {
      event.preventDefault();
      this.read(Math.min(blocks, Math.max(1, (this.at ?? 1 - by) + by)));
    } else if (event.key === "Enter") {
      this.openAt(this.at);
    } else if (event.key === "Escape") {
      this.read(null);
    }
  }

  openAt(id) {
    const owner = id && this.map ? this.map.requests[this.map.owners[id]] : null;
    if (owner) this.open(owner.request_id);
  }
}

/** Another hue for each request, and the same one as long as it lives. */
export function colorOf(key) {
  return `hsl(${(key * 137.508) % 360} ${theme["held-color"]} ${theme["held-light"]})`;
}

function piece(name, text) {
  const key = name === "used" ? [] : [make("span", { class: `key ${name}` })];
  return [...key, `${text} `];
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}
