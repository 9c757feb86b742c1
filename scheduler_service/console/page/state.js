// What is known of the scheduler: the updates of WatchState, put together. Draws nothing.

const STEPS_KEPT = 1024;

export class State {
  constructor() {
    this.totals = {};
    this.forget();
  }

  forget() {
    this.version = "";
    this.counters = {};
    this.workers = new Map();
    this.queues = new Map();
    this.heads = new Map();
    this.requests = new Map(); // by key
    this.steps = new Map(); // by worker: rows, the oldest first
  }

  apply(update) {
    if (update.snapshot) {
      this.forget();
      this.version = update.version;
    }
    this.totals = update;
    if (update.counters) this.counters = update.counters;
    for (const id of update.removed_worker_ids) {
      this.workers.delete(id);
      this.steps.delete(id);
    }
    for (const worker of update.workers) this.workers.set(worker.worker_id, worker);
    for (const head of update.heads) this.heads.set(head.model, head);
    this.applyQueues(update.queues);
    this.applyRequests(update);
    for (const steps of update.steps) this.applySteps(steps);
  }

  applyQueues(queues) {
    for (const queue of queues) {
      const name = JSON.stringify([queue.model, queue.tenant, queue.priority]);
      if (queue.waiting_requests || queue.preempted_requests || queue.running_requests) this.queues.set(name, queue);
      else this.queues.delete(name);
    }
  }

  applyRequests(update) {
    for (const key of update.ended_keys) this.requests.delete(key);
    const columns = update.requests;
    const names = Object.keys(columns);
    for (let i = 0; i < columns.key.length; i++) {
      const request = { born: update.time_seconds - columns.age_seconds[i] };
      for (const name of names) request[name] = columns[name][i];
      request.name = request.index ? `${request.request_id}/${request.index}` : request.request_id;
      this.requests.set(request.key, request);
    }
    const progress = update.progress;
    if (!progress) return;
    for (let i = 0; i < progress.keys.length; i++) {
      const request = this.requests.get(progress.keys[i]);
      if (!request) continue;
      request.output_tokens = progress.output_tokens[i];
      request.computed_tokens = progress.computed_tokens[i];
      request.blocks = progress.blocks[i];
    }
  }

  applySteps(told) {
    const rows = this.steps.get(told.worker_id) ?? [];
    for (let i = 0; i < told.sequences.length; i++) {
      rows.push({
        sequence: told.sequences[i],
        ended: told.ended_seconds[i],
        ms: told.durations_ms[i],
        prefill: told.prefill_tokens[i],
        decode: told.decode_tokens[i],
        budget: told.budget_tokens[i],
        requests: told.requests[i],
      });
    }
    if (rows.length > STEPS_KEPT) rows.splice(0, rows.length - STEPS_KEPT);
    this.steps.set(told.worker_id, rows);
  }
}
