// The dashboard's rollouts: requests /fleet/rollouts every two seconds while the tab is visible.
// history.js hands over the models' figures and the error budgets. Texts go into text nodes only.

import { minutes, percent, plain, time } from "./figures.js";
import { keyHeaders, keptKey } from "./keys.js";

const PERIOD_MS = 2_000; // the judge looks as often
const ANSWER_DEADLINE_MS = 5_000;
const ENDED = ["promoted", "rolled_back"];
const SIGNALS = { rejected: "rejected (4xx)", ttft: "slow first token", itl: "slow tokens" };
const find = (id) => document.getElementById(id);
const part = (root, name) => root.querySelector(`[data-figure="${name}"]`);
const rows = new Map(); // by the rollout's id
let rollouts = null;
let models = {};
let slo = null;
let timer = 0;

document.addEventListener("visibilitychange", look);
find("key-form").addEventListener("submit", () => queueMicrotask(look)); // after the key is kept
look();

/** Use the models' figures of the last hour and the error budgets; null for none. */
export function noteFigures(past, report) {
  models = past?.models ?? models;
  slo = report ?? slo;
  if (rollouts) show();
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  timer = setTimeout(look, PERIOD_MS);
  try {
    // The notice of dashboard.js says what is wrong; old figures stay.
    const signal = AbortSignal.timeout(ANSWER_DEADLINE_MS);
    const answer = await fetch("/fleet/rollouts", { headers: keyHeaders(keptKey()), signal, cache: "no-store" });
    if (!answer.ok) return;
    rollouts = (await answer.json()).data;
    show();
  } catch (error) {
    if (!["TypeError", "TimeoutError"].includes(error.name)) throw error; // the server is away
  }
}

function show() {
  const isOver = ({ phase }) => ENDED.includes(phase);
  find("no-rollouts").hidden = !rollouts.every(isOver);
  const ids = rollouts.map(({ id }) => id);
  for (const [id, row] of rows) {
    if (ids.includes(id)) continue;
    row.remove();
    rows.delete(id);
  }
  for (const one of rollouts) {
    if (!rows.has(one.id)) rows.set(one.id, find("rollout-row").content.firstElementChild.cloneNode(true));
    showRollout(rows.get(one.id), one);
  }
  const inOrder = [...rollouts].sort((a, b) => isOver(a) - isOver(b)).map(({ id }) => rows.get(id));
  if (inOrder.some((row, place) => find("rollouts").children[place] !== row)) find("rollouts").append(...inOrder);
}

function showRollout(row, one) {
  row.dataset.state = one.phase;
  fill(part(row, "model"), one.model);
  fill(part(row, "versions"), `${one.stable} → ${one.candidate} ${one.candidate_digest.replace("sha256:", "").slice(0, 12)}`);
  fill(part(row, "phase"), phaseName(one.phase));
  fill(part(row, "said"), one.said);
  const trouble = troubleOf(one);
  fill(part(row, "trouble"), trouble);
  part(row, "trouble").hidden = !trouble;
  renew(part(row, "steps"), one.shares.map((share, place) => stepMark(one, share, place + 1)));
  fill(part(row, "stable"), one.stable);
  fill(part(row, "candidate"), one.candidate);
  renew(part(row, "arms"), armRows(one).map(([name, ...cells]) => tableRow(name, cells)));
  renew(part(row, "facts"), facts(one).map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
  renew(part(row, "history"), [...one.history].reverse().map(note));
}

function troubleOf({ stable, route_valid_s }) {
  if (route_valid_s !== 0) return "";
  return `This server has no valid route of this rollout: all its new requests go to ${stable}. Control, its store or its link is away, or the server's log has the reason.`;
}

function stepMark({ phase, step }, share, number) {
  const isPast = number < step || phase === "promoted";
  const mark = element("li", { class: isPast ? "past" : "" }, percent(share));
  if (number === step && !ENDED.includes(phase)) mark.setAttribute("aria-current", "step");
  return mark;
}

/** Rows of the table: a name, then a text for each version. */
function armRows({ stable, candidate, share, counts, recent }) {
  const totals = Object.values(counts).map(([a, b, c, d]) => [a + b, c + d]);
  const most = (place) => plain(Math.max(0, ...totals.map((pair) => pair[place])));
  const latest = (version, figure) => models[version]?.[figure]?.at(-1) ?? null;
  const seconds = (figure) => [stable, candidate].map((version) => (latest(version, figure) === null ? "–" : time(latest(version, figure))));
  return [
    ["share of new requests", percent(1 - share), percent(share)],
    ["requests", most(0), most(1)],
    ...Object.entries(counts).map(([signal, four]) => {
      const minute = recent[signal] ?? [0, 0, 0, 0];
      const cell = (at) => `${badShare(four[at], four[at + 1])}; last minute ${plain(minute[at + 1])} of ${plain(minute[at] + minute[at + 1])}`;
      return [SIGNALS[signal] ?? signal, cell(0), cell(2)];
    }),
    ["time to first token, p50", ...seconds("ttft_p50_s")],
    ["time to first token, p99", ...seconds("ttft_p99_s")],
  ];
}

function badShare(good, bad) {
  return good + bad ? `${percent(bad / (good + bad))} (${plain(bad)} of ${plain(good + bad)})` : "none";
}

function facts({ cost, shadow, shadow_share, zones }) {
  const found = [["device time for the same work", cost ? `${plain(cost[0])} to ${plain(cost[1])} times as much` : "not known yet"]];
  if (zones.length) found.unshift(["zones with the candidate", zones.join(", ")]);
  for (const { name, freezes, budget } of slo?.objectives ?? []) {
    if (freezes) found.push([`error budget left, ${name}`, `${minutes(budget.remaining_minutes)} of ${minutes(budget.minutes)}`]);
  }
  if (slo?.is_frozen) found.push(["rollouts are frozen", slo.reason]);
  const { pairs, failed, skipped, rows_while_waiting, same_finish, equal_tokens, tokens, ttft_s, itl_s } = shadow;
  if (!(shadow_share || pairs || failed)) return found;
  const mean = (sums) => sums.map((sum) => (pairs ? time(sum / pairs) : "–")).join(" → ");
  found.push(
    ["shadow copies compared", `${plain(pairs)}; ${plain(failed)} failed, ${plain(skipped)} skipped`],
    ["copies run while requests waited", plain(rows_while_waiting)],
    ["same finish reason", pairs ? percent(same_finish / pairs) : "–"],
    ["equal tokens from the start", tokens[0] ? percent(equal_tokens / tokens[0]) : "–"],
    ["mean time to first token of pairs", mean(ttft_s)],
    ["mean time between tokens of pairs", mean(itl_s)],
  );
  return found;
}

function note({ at, phase, step, said, actor }) {
  const when = new Date(1000 * at);
  const shown = element("time", { datetime: when.toISOString() }, when.toLocaleString());
  return element("li", {}, shown, ` ${phaseName(phase)}, step ${step}: ${said} (${actor || "the judge"})`);
}

function phaseName(phase) {
  return phase.replaceAll("_", " ");
}

function tableRow(name, cells) {
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((text) => element("td", {}, text)));
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function fill(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** Replace an element's children if they differ, so that selected text stays selected. */
function renew(place, children) {
  const fresh = place.cloneNode(false);
  fresh.append(...children);
  if (!fresh.isEqualNode(place)) place.replaceChildren(...fresh.childNodes);
}
