// The dashboard: requests /fleet/status every two seconds while the tab is visible, and shows the
// changes. Numbers and names go into text nodes only.

import { drawSparkline } from "./charts.js";
import { Series, isAnother, quantile, ratesOf } from "./figures.js";
import { keepKey, keyHeaders, keptKey } from "./keys.js";

const PERIOD_MS = 2_000; // faster changes cannot be read
const ANSWER_DEADLINE_MS = 5_000;
const PLACES = 60; // two minutes
const FEWEST_PLACES = 20; // fewer samples are drawn at the right
const GONE = "The server does not answer. Showing the last figures; retrying…";
const NEEDS_KEY = "This server needs an API key. Enter the key of an operator.";
const WRONG_KEY = "This server refuses the API key below: it is wrong or expired. Enter the key of an operator.";
const FOR_OPERATORS = "The dashboard needs the key of an operator. A server without tenants shows it on its own machine only; from elsewhere use: ssh -L 8000:127.0.0.1:8000 HOST.";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const part = (root, name) => root.querySelector(`[data-figure="${name}"]`);
const tiles = ["queued", "running", "tokens", "cached", "ttft50", "ttft99", "itl50", "itl99"];
const series = Object.fromEntries(tiles.map((name) => [name, new Series(PLACES)]));
const rows = new Map(); // of workers, by role and name
const modelRows = new Map(); // by name
const VERSION_DIGITS = 12; // of a digest: enough to tell versions apart
const BYTE_STEPS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const TIME_STEPS = [[3_600, "h"], [60, "min"]];
let previous = null;
let timer = 0;
let isAsking = false;

const keyForm = document.getElementById("key-form");
const keyField = document.getElementById("key");
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(keyField.value.trim());
  look();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
look();

async function look() {
  clearTimeout(timer);
  if (isAsking || document.hidden) return;
  isAsking = true;
  try {
    const signal = AbortSignal.timeout(ANSWER_DEADLINE_MS);
    const answer = await fetch("/fleet/status", { headers: keyHeaders(keptKey()), signal, cache: "no-store" });
    if (answer.ok) show(await answer.json());
    else refuse(answer.status);
  } catch {
    say(GONE);
  } finally {
    isAsking = false;
    if (!document.hidden) timer = setTimeout(look, PERIOD_MS);
  }
}

function refuse(status) {
  const wantsKey = status === 401 || status === 403;
  if (status === 401) say(keptKey() ? WRONG_KEY : NEEDS_KEY);
  else say(wantsKey ? FOR_OPERATORS : `The server answered with an error (${status}); retrying…`);
  if (!wantsKey || !keyForm.hidden) return;
  keyField.value = keptKey();
  keyForm.hidden = false;
  keyField.focus();
}

function say(words) {
  const notice = document.getElementById("notice");
  if (notice.textContent !== words) notice.textContent = words;
  notice.hidden = !words;
  document.body.classList.toggle("is-stale", Boolean(words));
  document.getElementById("fresh").textContent = words ? "Not connected" : "Live";
  document.getElementById("fresh").dataset.state = words ? "waiting" : "open";
}

function show(status) {
  keyForm.hidden = true;
  say(status.is_draining ? "This server is draining: it accepts no new requests and will stop." : "");
  if (previous && isAnother(status, previous)) for (const one of Object.values(series)) one.clear();
  previous = status;
  const model = document.getElementById("model");
  model.textContent = status.models.length > 1 ? `${status.models.length} models` : status.model;
  model.hidden = false;
  document.getElementById("version").textContent = `Triolet ${status.version}`;
  showTiles(status, ratesOf(status.recent));
  showCounts("queued_by_class", status.queued_by_class);
  showCounts("rejected_by_code", status.rejected_by_code);
  showCounts("errors_by_status", status.errors_by_status);
  showModels(status.models);
  showWorkers(status.workers, status.models.length > 1);
}

function showModels(models) {
  keepRows(modelRows, models.map(({ name }) => name), newModelRow);
  for (const model of models) {
    const row = modelRows.get(model.name);
    row.dataset.state = model.state;
    fill(part(row, "state"), model.state);
    fill(part(row, "version"), model.digest?.replace("sha256:", "").slice(0, VERSION_DIGITS) ?? "");
    fill(part(row, "workers"), whole.format(model.workers.length));
    fill(part(row, "running"), whole.format(model.running));
    fill(part(row, "queued"), whole.format(model.queued));
    fill(part(row, "weights"), bytes(model.weights_bytes));
    fill(part(row, "kv"), bytes(model.kv_bytes));
    for (const name of ["prompt_tokens", "completion_tokens"]) fill(part(row, name), whole.format(model[name] ?? 0));
    fill(part(row, "worker_seconds"), model.worker_seconds == null ? "–" : workerTime(model.worker_seconds));
  }
  document.getElementById("models-section").hidden = models.length === 0;
}

function newModelRow(name) {
  const row = document.getElementById("model-row").content.firstElementChild.cloneNode(true);
  part(row, "name").textContent = name;
  document.getElementById("models").append(row);
  return row;
}

/** Add missing rows, and remove unused ones. */
function keepRows(kept, keys, make) {
  for (const key of keys) if (!kept.has(key)) kept.set(key, make(key));
  for (const [key, row] of kept) {
    if (keys.includes(key)) continue;
    row.remove();
    kept.delete(key);
  }
}

/** Show a list of names and numbers of any length. */
function showCounts(id, counts) {
  const list = document.getElementById(id);
  const names = Object.keys(counts);
  while (list.children.length > names.length) list.lastElementChild.remove();
  names.forEach((name, place) => {
    const entry = list.children[place] ?? list.appendChild(newCount());
    fill(entry.querySelector("dt"), name.replaceAll("_", " "));
    fill(entry.querySelector("dd"), whole.format(counts[name]));
  });
  document.getElementById(`no-${id}`).hidden = names.length > 0;
}

function newCount() {
  const entry = document.createElement("div");
  entry.append(document.createElement("dt"), document.createElement("dd"));
  return entry;
}

function showTiles(status, rates) {
  const { ttft, itl } = status.recent.latencies;
  fill(document.getElementById("recent"), duration(status.recent.seconds));
  put("queued", status.queued, whole.format);
  put("running", status.running, whole.format);
  put("tokens", rates.tokensPerSecond, rate);
  put("cached", rates.cachedShare, (share) => `${whole.format(100 * share)} %`);
  put("ttft50", quantile(ttft, 0.5), duration);
  put("ttft99", quantile(ttft, 0.99), duration);
  put("itl50", quantile(itl, 0.5), duration);
  put("itl99", quantile(itl, 0.99), duration);
  fill(document.getElementById("connections"), whole.format(status.connections));
  fill(document.getElementById("brownout"), `${whole.format(status.brownout)} of 4`);
  for (const name of ["requests_accepted", "requests_rejected", "attempts_failed"]) {
    fill(document.getElementById(name), whole.format(status.counters[name]));
  }
}

function put(name, value, format) {
  series[name].add(value);
  const tile = part(document, name);
  fill(tile.querySelector(".value"), value === null ? "–" : format(value));
  const { values } = series[name];
  drawSparkline(tile.querySelector("svg"), values, Math.max(values.length, FEWEST_PLACES));
}

function showWorkers(workers, hasSeveralModels) {
  const byKey = new Map(workers.map((worker) => [`${worker.role} ${worker.name}`, worker]));
  keepRows(rows, [...byKey.keys()], (key) => newRow(byKey.get(key)));
  for (const [key, worker] of byKey) {
    fill(part(rows.get(key), "model"), hasSeveralModels ? worker.model : "");
    showWorker(rows.get(key), worker);
  }
  document.getElementById("no-workers").hidden = workers.length > 0;
}

function newRow({ role, name }) {
  const row = document.getElementById("worker").content.firstElementChild.cloneNode(true);
  part(row, "name").textContent = name;
  part(row, "role").textContent = role;
  document.getElementById("workers").append(row);
  return row;
}

function showWorker(row, { state, breaker, blocks, sequences, step_s }) {
  const isLeftOut = breaker !== "closed";
  row.dataset.state = isLeftOut ? "left-out" : state;
  fill(part(row, "state"), isLeftOut ? `${state}, left out` : state);
  for (const name of ["used", "cached", "free"]) {
    fill(part(row, name), whole.format(blocks[name]));
    part(row, `${name}-bar`).setAttribute("width", String(blocks.all > 0 ? (100 * blocks[name]) / blocks.all : 0));
  }
  const used = blocks.all > 0 ? (100 * blocks.used) / blocks.all : 0;
  const cached = blocks.all > 0 ? (100 * blocks.cached) / blocks.all : 0;
  part(row, "cached-bar").setAttribute("x", String(used));
  part(row, "free-bar").setAttribute("x", String(used + cached));
  for (const name of ["running", "waiting", "paused"]) fill(part(row, name), whole.format(sequences[name]));
  fill(part(row, "step"), step_s > 0 ? duration(step_s) : "–");
}

function fill(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function bytes(count) {
  const [size, unit] = BYTE_STEPS.find(([least]) => count >= least) ?? [1, "B"];
  const shown = count / size;
  return `${shown < 10 && size > 1 ? shown.toFixed(1) : whole.format(shown)} ${unit}`;
}

function workerTime(seconds) {
  const [size, unit] = TIME_STEPS.find(([least]) => seconds >= least) ?? [1, "s"];
  return `${(seconds / size).toFixed(size > 1 ? 1 : 0)} ${unit}`;
}

function rate(value) {
  return value > 0 && value < 10 ? value.toFixed(1) : whole.format(value);
}

function duration(seconds) {
  if (seconds >= 10) return `${whole.format(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const ms = 1000 * seconds;
  return ms < 10 ? `${ms.toFixed(1)} ms` : `${whole.format(ms)} ms`;
}
