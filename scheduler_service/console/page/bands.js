// Steps of each worker as a band that moves: one column a step, decodes below, prefill above them.

import { count, duration, make, say, surface, theme } from "/format.js";

const HEIGHT = 84;
const COLUMN = 4;

export class Bands {
  constructor(container, reading) {
    this.container = container;
    this.reading = reading;
    this.bands = new Map();
  }

  draw(state) {
    for (const [id, band] of this.bands) {
      if (!state.workers.has(id)) {
        band.element.remove();
        this.bands.delete(id);
      }
    }
    for (const worker of state.workers.values()) {
      if (!this.bands.has(worker.worker_id)) this.bands.set(worker.worker_id, this.newBand(worker.worker_id));
      this.drawBand(this.bands.get(worker.worker_id), worker, state.steps.get(worker.worker_id) ?? []);
    }
  }

  newBand(id) {
    const note = make("small", { class: "num" });
    const canvas = make("canvas", { tabindex: "0", role: "img" });
    const element = make("div", { class: "band" }, make("div", { class: "name", title: id }, id, note), canvas);
    this.container.append(element);
    const band = { element, canvas, note, rows: [], back: null };
    canvas.addEventListener("pointermove", (event) => this.read(band, Math.floor((canvas.clientWidth - event.offsetX) / COLUMN)));
    canvas.addEventListener("pointerleave", () => this.read(band, null));
    canvas.addEventListener("blur", () => this.read(band, null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
      if (step) {
        event.preventDefault();
        this.read(band, Math.max(0, (band.back ?? -1) + step));
      }
    });
    return band;
  }

  /** Says what is in the step that is `back` steps old. */
  read(band, back) {
    band.back = back;
    const step = back === null ? null : band.rows[band.rows.length - 1 - back];
    const text = step && `step ${step.sequence}: ${count(step.decode)} decode and ${count(step.prefill)} prefill of ${count(step.budget)} tokens, ${count(step.requests)} requests, ${duration(step.ms)}`;
    say(this.reading, text || "");
    this.paint(band);
  }

  drawBand(band, worker, rows) {
    band.rows = rows;
    say(band.note, `${worker.steps_per_second.toFixed(1)} steps/s, ${worker.running_requests} of ${worker.num_slots} slots`);
    const last = rows.at(-1);
    const label = last ? `last step: ${last.decode} decode and ${last.prefill} prefill tokens of at most ${last.budget}` : "no steps yet";
    band.canvas.setAttribute("aria-label", `Steps of ${worker.worker_id}; ${label}`);
    this.paint(band);
  }

  paint({ canvas, rows, back }) {
    const width = canvas.clientWidth;
    if (!width) return;
    const context = surface(canvas, width, HEIGHT);
    const shown = rows.slice(-Math.floor(width / COLUMN));
    const most = shown.reduce((top, step) => Math.max(top, step.budget, step.prefill + step.decode), 1);
    // Roots, since a few decodes are as much a part of the story as a prompt of thousands.
    const y = (tokens) => HEIGHT - Math.sqrt(tokens / most) * (HEIGHT - 14);
    const left = width - shown.length * COLUMN;
    shown.forEach((step, i) => {
      const x = left + i * COLUMN;
      context.fillStyle = theme.accent;
      context.fillRect(x, y(step.decode), COLUMN - 1, HEIGHT - y(step.decode));
      context.fillStyle = theme["accent-half"];
      context.fillRect(x, y(step.decode + step.prefill), COLUMN - 1, y(step.decode) - y(step.decode + step.prefill));
    });
    if (back !== null && back < shown.length) {
      context.fillStyle = theme.ink;
      context.globalAlpha = 0.16;
      context.fillRect(width - (back + 1) * COLUMN, 0, COLUMN - 1, HEIGHT);
      context.globalAlpha = 1;
    }
    this.paintBudget(context, shown, left, y);
  }

  paintBudget(context, shown, left, y) {
    if (!shown.length) return;
    context.strokeStyle = theme.quiet;
    context.setLineDash([4, 3]);
    context.beginPath();
    shown.forEach((step, i) => {
      const at = Math.round(y(step.budget)) + 0.5;
      context[i ? "lineTo" : "moveTo"](left + i * COLUMN, at);
      context.lineTo(left + (i + 1) * COLUMN, at);
    });
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = theme.quiet;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.fillText(`${count(shown.at(-1).budget)} tokens`, left + shown.length * COLUMN, y(shown.at(-1).budget) - 4);
  }
}
