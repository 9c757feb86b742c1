// The last hour as three lines: first token, between tokens, throughput.

import { count, duration, make, rate, say, surface, theme } from "/format.js";

const HEIGHT = 120;
const BOTTOM = 16;
const CHARTS = [
  ["first_token", "First token", (d) => [d.time_to_first_token.p50_ms, d.time_to_first_token.p95_ms], (d) => d.time_to_first_token.counts, duration],
  ["between_tokens", "Between tokens", (d) => [d.between_tokens.p50_ms, d.between_tokens.p95_ms], (d) => d.between_tokens.counts, duration],
  ["throughput", "Output tokens a second", (d, lengths) => [d.output_tokens.map((n, k) => n / lengths[k])], null, rate],
];

export class Charts {
  constructor(container) {
    this.charts = CHARTS.map(([name, title]) => {
      const reading = make("span", { "data-chart": name });
      const canvas = make("canvas", { role: "img" });
      container.append(make("div", { class: "chart" }, make("h3", {}, title, reading), canvas));
      const chart = { canvas, reading, at: null };
      canvas.addEventListener("pointermove", (event) => this.point(chart, event.offsetX / canvas.clientWidth));
      canvas.addEventListener("pointerleave", () => this.point(chart, null));
      return chart;
    });
  }

  point(chart, at) {
    chart.at = at;
    this.draw();
  }

  show(answer) {
    this.answer = answer;
    this.draw();
  }

  draw() {
    if (!this.answer?.intervals.started_seconds.length) return;
    const { intervals, interval_seconds: seconds } = this.answer;
    const now = Date.now() / 1000;
    // Of a service that is younger, as much as there is.
    const span = Math.min(3600, Math.max(300, now - (intervals.started_seconds[0] ?? now)));
    const lengths = intervals.started_seconds.map((start) => Math.min(seconds, Math.max(1, now - start)));
    CHARTS.forEach(([, title, read, counts, show], i) => {
      const present = intervals.started_seconds.map((_, k) => !counts || counts(intervals)[k] > 0);
      this.paint(this.charts[i], title, intervals.started_seconds, read(intervals, lengths), present, now, seconds, show, span);
    });
  }

  paint(chart, title, times, lines, present, now, seconds, show, span) {
    const width = chart.canvas.clientWidth;
    if (!width) return;
    const context = surface(chart.canvas, width, HEIGHT);
    const most = Math.max(1e-9, ...lines.flatMap((line) => line.filter((_, k) => present[k])));
    const x = (time) => width - ((now - time) / span) * width;
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - BOTTOM - 16);
    axes(context, width, show(most), y(most), y(0), span / 60);
    lines.forEach((line, k) => stroke(context, times, line, present, seconds, x, y, k ? theme["accent-half"] : theme.accent));
    const place = nearest(times, present, chart.at === null ? now : now - (1 - chart.at) * span);
    const text = place < 0 ? "" : `${clock(times[place])}  ${lines.map((line) => show(line[place])).join(" · ")}`;
    say(chart.reading, text);
    chart.canvas.setAttribute("aria-label", `${title} over the last hour. ${text}`);
    if (chart.at !== null && place >= 0) {
      context.fillStyle = theme.quiet;
      context.fillRect(Math.round(x(times[place] + seconds / 2)), 8, 1, HEIGHT - BOTTOM - 8);
    }
  }
}

function axes(context, width, label, top, bottom, minutes) {
  context.strokeStyle = theme.rule;
  context.beginPath();
  for (const at of [top, bottom]) {
    context.moveTo(0, Math.round(at) + 0.5);
    context.lineTo(width, Math.round(at) + 0.5);
  }
  context.stroke();
  context.fillStyle = theme.quiet;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  context.fillText(label, 0, top - 4);
  context.fillText(`${Math.round(minutes)} min ago`, 0, HEIGHT - 3);
  context.textAlign = "right";
  context.fillText("now", width, HEIGHT - 3);
}

/** A line that breaks where nothing was measured. */
function stroke(context, times, values, present, seconds, x, y, color) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.beginPath();
  let last = null;
  times.forEach((time, k) => {
    if (!present[k]) return;
    const at = [x(time + seconds / 2), y(values[k])];
    if (last !== null && time - last < seconds * 1.5) context.lineTo(...at);
    else context.moveTo(...at);
    context.fillRect(at[0] - 1, at[1] - 1, 2, 2);
    last = time;
  });
  context.stroke();
  context.lineWidth = 1;
}

function nearest(times, present, wanted) {
  let best = -1;
  times.forEach((time, k) => {
    if (present[k] && (best < 0 || Math.abs(time - wanted) < Math.abs(times[best] - wanted))) best = k;
  });
  return best;
}

function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}
