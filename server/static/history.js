// The dashboard's charts of the last hour and its error budgets. Requests /fleet/history and
// /admin/slo every ten seconds while the tab is visible.

import { LineChart } from "./charts.js";
import { minutes, percent, plain, time } from "./figures.js";
import { keyHeaders, keptKey } from "./keys.js";
import { noteFigures } from "./rollouts.js";

const PERIOD_MS = 10_000; // the server's usual interval
const ANSWER_DEADLINE_MS = 8_000;
const find = (id) => document.getElementById(id);
const parent = find("charts");
const CHARTS = [
  ["Tokens per second", plain, { sent: "tokens_per_s", prompt: "prompt_tokens_per_s" }],
  ["Time to first token", time, { p50: "ttft_p50_s", p99: "ttft_p99_s" }],
  ["Time between tokens (ITL)", time, { p50: "itl_p50_s", p99: "itl_p99_s" }],
  ["Requests in the queue", plain, { waiting: "queued" }],
  ["KV blocks used on decode", percent, { used: "kv_used_share" }],
  ["Refusals per second", plain, { refused: "refusals_per_s" }],
].map(([title, format, lines]) => [new LineChart(parent, title, format), lines]);
const tenantChart = new LineChart(parent, "Tokens per second, by tenant (ended requests)", plain);
const burnChart = new LineChart(parent, "Burn rate over 1 h (above 1: too fast)", plain);
const leftChart = new LineChart(parent, "Error budget left", minutes);
let history = null;
let timer = 0;

for (const id of ["chart-model", "chart-tenant"]) find(id).addEventListener("change", draw);
document.addEventListener("visibilitychange", look);
find("key-form").addEventListener("submit", () => queueMicrotask(look)); // after the key is kept
look();

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  timer = setTimeout(look, PERIOD_MS);
  try {
    // Errors leave the old charts in place; dashboard.js shows a notice.
    const [past, slo] = await Promise.all([ask("/fleet/history"), ask("/admin/slo")]);
    if (past) {
      history = past;
      offer("chart-model", "All models", Object.keys(past.models));
      offer("chart-tenant", "All tenants", Object.keys(past.tenants));
      draw();
    }
    if (slo) showBudgets(slo);
    noteFigures(past, slo);
  } catch (error) {
    if (!["TypeError", "TimeoutError"].includes(error.name)) throw error; // the server does not answer
  }
}

async function ask(path) {
  const signal = AbortSignal.timeout(ANSWER_DEADLINE_MS);
  const answer = await fetch(path, { headers: keyHeaders(keptKey()), signal, cache: "no-store" });
  return answer.ok ? answer.json() : null;
}

/** Set a select's options to these names, and keep the current choice if possible. */
function offer(id, all, names) {
  const select = find(id);
  const wanted = select.value;
  const options = names.map((name) => new Option(name, name));
  select.replaceChildren(new Option(all, ""), ...options);
  select.value = names.includes(wanted) ? wanted : "";
}

function draw() {
  if (!history) return;
  const { at_s, all, models, tenants, objectives } = history;
  const figures = models[find("chart-model").value] ?? all;
  for (const [chart, lines] of CHARTS) {
    chart.draw(at_s, Object.entries(lines).map(([name, figure]) => ({ name, values: figures[figure] ?? [] })));
  }
  const hasTenants = Object.keys(tenants).length > 0;
  find("tenant-choice").hidden = !hasTenants;
  tenantChart.root.hidden = !hasTenants;
  const tenant = find("chart-tenant").value;
  const shown = Object.entries(tenants).filter(([name]) => !tenant || name === tenant);
  tenantChart.draw(at_s, shown.map(([name, { tokens_per_s }]) => ({ name, values: tokens_per_s })));
  const all_of = (figure) => Object.entries(objectives).map(([name, one]) => ({ name, values: one[figure] }));
  burnChart.draw(at_s, all_of("burn_rate"));
  leftChart.draw(at_s, all_of("remaining_minutes"));
}

function showBudgets({ objectives, is_frozen, reason }) {
  find("frozen").textContent = is_frozen ? `Rollouts are frozen: ${reason}.` : "Rollouts are not frozen.";
  find("frozen").classList.toggle("notice", is_frozen);
  find("budgets").replaceChildren(...objectives.map((one) => {
    const row = find("budget-row").content.firstElementChild.cloneNode(true);
    const { good, total } = one.events.budget ?? { good: 0, total: 0 };
    const words = {
      name: one.name,
      target: percent(one.target),
      good: total ? `${percent(good / total)} of ${plain(total)}` : "no events",
      left: `${minutes(one.budget.remaining_minutes)} of ${minutes(one.budget.minutes)}`,
      frozen: one.freezes ? (one.budget.is_spent ? "frozen: budget spent" : "allowed") : "never frozen",
    };
    for (const [figure, text] of Object.entries(words)) row.querySelector(`[data-figure="${figure}"]`).textContent = text;
    row.querySelector('[data-figure="burn"]').append(...one.pairs.map((pair) => burnWords(one.burn_rates, pair)));
    return row;
  }));
  find("no-budgets").hidden = objectives.length > 0;
}

function burnWords(rates, { severity, long, short, limit, fires }) {
  const words = document.createElement("span");
  const [a, b] = [long, short].map((window) => `${window} ${rates[window] === null ? "–" : plain(rates[window])}`);
  words.textContent = `${a}, ${b} (${severity} above ${plain(limit)})${fires ? ": fires" : ""}`;
  if (fires) words.className = "fires";
  return words;
}
