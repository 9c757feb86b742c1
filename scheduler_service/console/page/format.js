// Numbers and elements for people. Owns no state.

export const STATUS = ["", "waiting", "running", "preempted", "finished"];
export const WORKER_STATUS = ["", "connecting", "ready", "draining"];

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (value) => whole.format(value);
export const rate = (value) => (value >= 100 ? whole : tenth).format(value);
export const percent = (share) => `${whole.format(share * 100)} %`;

/** Milliseconds, or seconds where there are many. */
export function duration(ms) {
  if (ms >= 10000) return `${tenth.format(ms / 1000)} s`;
  return `${(ms >= 10 ? whole : tenth).format(ms)} ms`;
}

export function age(seconds) {
  if (seconds < 60) return `${tenth.format(Math.max(0, seconds))} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** An element. Text is always text, so names from clients can't become markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Changes text only where it is another one, so that selections stay. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What colours are called in the style sheet, for canvases. Read again when the theme changes. */
export const theme = {};
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "quiet", "rule", "faint", "accent", "accent-half", "alert", "free", "cached", "held-light", "held-color"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

/** A canvas's context, its size being that of the screen's pixels, in CSS pixels. */
export function surface(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
