// Where a candidate's time went: the phases that its timeline tells of, in order. Draws nothing.

/** Phases of a candidate of ExplainRequest; they fill its time without gaps. Seconds since arrival. */
export function waterfall(candidate) {
  const timeline = candidate.timeline;
  const last = timeline.at(-1);
  const total = last?.event === "finished" ? last.at_seconds : candidate.state.age_seconds;
  const first = timeline.find((entry) => entry.event === "first_token");
  // One that was restored after a restart and has tokens had its first one before, at a time that is not known.
  const hadToken = timeline[0]?.event === "restored" && !first && candidate.state.output_tokens > 0;
  const phases = phasesOf(candidate, timeline, total, hadToken);
  const decode = phases.filter((phase) => phase.name === "decode").reduce((sum, phase) => sum + phase.end - phase.start, 0);
  const later = hadToken ? 0 : candidate.state.output_tokens - 1;
  return { phases, total, firstToken: first ? first.at_seconds : null, betweenTokens: later > 0 ? decode / later : null };
}

function phasesOf(candidate, timeline, total, hasToken) {
  const phases = [];
  let name = "queue";
  let began = { at_seconds: 0, worker_id: "", step_sequence: 0, detail: "" };
  for (const entry of [...timeline, { at_seconds: total, event: "", step_sequence: 0 }]) {
    if (entry.event === "queued" || entry.event === "restored") continue;
    if (entry.event === "first_token") {
      hasToken = true;
      if (name !== "prefill") continue;
    }
    if (name) phases.push(phase(candidate, name, began, entry));
    const worker = entry.event === "first_token" ? began.worker_id : entry.worker_id;
    began = { ...entry, worker_id: worker };
    name = nameOf(entry.event, hasToken);
  }
  return phases;
}

function nameOf(event, hasToken) {
  if (event === "preempted") return "preempted";
  return ["admitted", "resumed", "first_token"].includes(event) ? (hasToken ? "decode" : "prefill") : "";
}

function phase(candidate, name, began, end) {
  const onWorker = name === "prefill" || name === "decode";
  const chunks = [];
  const told = onWorker ? candidate.chunks : null;
  for (let i = 0; told && i < told.at_seconds.length; i++) {
    const at = told.at_seconds[i];
    if (at >= began.at_seconds && at < end.at_seconds) chunks.push({ at, step: told.step_sequences[i], tokens: told.tokens[i] });
  }
  return {
    name,
    start: began.at_seconds,
    end: end.at_seconds,
    worker: began.worker_id ?? "",
    firstStep: onWorker ? began.step_sequence : 0,
    lastStep: onWorker ? end.step_sequence : 0,
    detail: began.detail ?? "",
    chunks,
  };
}
