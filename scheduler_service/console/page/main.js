// Puts the page together: one stream of updates, and one drawing for each.

import { Bands } from "/bands.js";
import { Blocks } from "/blocks.js";
import { Charts } from "/charts.js";
import { Detail } from "/detail.js";
import { Figures } from "/figures.js";
import { readTheme, say } from "/format.js";
import { Requests } from "/requests.js";
import { drawQueues, drawWorkers } from "/side.js";
import { State } from "/state.js";

const LATENCY_MS = 5000;

const at = (id) => document.getElementById(id);
const state = new State();
const figures = new Figures(at("figures"));
const bands = new Bands(at("steps"), at("steps-reading"));
const blocks = new Blocks(at("blocks"), at("blocks-workers"), at("blocks-counts"), at("blocks-reading"), open);
const requests = new Requests(at("requests"), at("filter"), at("requests-count"), open);
const detail = new Detail(at("detail-body"));
const charts = new Charts(at("charts"));
let due = false;

function open(name) {
  requests.select(name);
  const request = [...state.requests.values()].find((each) => each.request_id === name);
  blocks.select(request ? request.key : null);
  detail.open(name);
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
}

function draw() {
  due = false;
  say(at("version"), state.version);
  at("drain").hidden = !state.totals.draining;
  say(at("clock"), new Date((state.totals.time_seconds ?? 0) * 1000).toLocaleTimeString("en-GB"));
  figures.draw(state);
  bands.draw(state);
  blocks.drawTabs(state);
  requests.draw(state);
  drawQueues(at("queues"), at("heads"), state);
  drawWorkers(at("workers"), state);
  document.body.dataset.sequence = state.totals.sequence;
}

function drawSoon() {
  if (due || document.hidden) return;
  due = true;
  requestAnimationFrame(draw);
}

function link(text, isLive) {
  say(at("link"), text);
  at("link").classList.toggle("live", isLive);
}

function follow() {
  const stream = new EventSource("/api/watch");
  stream.onmessage = (event) => {
    state.apply(JSON.parse(event.data));
    link("Live", true);
    drawSoon();
    if (!document.hidden) Promise.all([blocks.load(), detail.load()]).catch(() => {});
  };
  stream.onerror = () => {
    link("No connection, trying again", false);
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
  };
}

async function loadLatency() {
  if (document.hidden) return;
  const answer = await fetch("/api/latency").catch(() => null);
  if (!answer?.ok) return;
  const told = await answer.json();
  figures.drawLatency(told);
  charts.show(told);
}

function repaint() {
  readTheme();
  draw();
  blocks.paint();
  charts.draw();
}

readTheme();
follow();
loadLatency();
setInterval(loadLatency, LATENCY_MS);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("resize", repaint);
addEventListener("visibilitychange", () => document.hidden || (repaint(), loadLatency()));
if (location.hash.length > 1) open(decodeURIComponent(location.hash.slice(1)));
