// The API browser at /docs: reads /openapi.json, shows each endpoint with its fields, and sends
// requests. All text goes into text nodes.

import { alternatives, boundsText, example, objectIn, resolve, typeText } from "./api_schema.js";
import { keepKey, keptKey, keyHeaders } from "./keys.js";

const MOST_SHOWN = 256 * 1024; // characters of an answer; more makes the page slow
const JSON_TYPE = "application/json";
const place = (id) => document.getElementById(id);

let api = null;
let opened = 0;

place("search").addEventListener("submit", (event) => event.preventDefault());
place("find").addEventListener("input", filter);
place("key").addEventListener("input", () => keepKey(place("key").value.trim()));
place("key").value = keptKey();
load();

async function load() {
  try {
    const answer = await fetch("/openapi.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    api = JSON.parse(await answer.text(), exactly);
  } catch (error) {
    place("notice").textContent = `/openapi.json cannot be read: ${error.message}. Reload the page to try again.`;
    place("notice").hidden = false;
    return;
  }
  place("version").textContent = `Triolet ${api.info.version}`;
  place("version").hidden = false;
  place("ask-key").hidden = !api.security;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "Other";
      groups.set(tag, [...(groups.get(tag) ?? []), { path, method, operation }]);
    }
  }
  for (const [tag, operations] of groups) place("operations").append(section(tag, operations));
  filter();
}

/** Keep all digits of integers that a JavaScript number cannot hold, such as the bounds of seeds. */
function exactly(_, value, context) {
  const isRounded = Number.isInteger(value) && !Number.isSafeInteger(value);
  return isRounded && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value;
}

/** Make an element with its class and its content: text, or elements. */
function make(name, className = "", ...inside) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...inside);
  return element;
}

function section(tag, operations) {
  const heading = make("h2", "", tag);
  heading.id = `tag-${tag.toLowerCase().replaceAll(/\W+/g, "-")}`;
  const found = make("section", "", heading, ...operations.map(row));
  found.setAttribute("aria-labelledby", heading.id);
  return found;
}

function row({ path, method, operation }) {
  const summary = make("summary", "", make("span", "method", method.toUpperCase()), make("span", "path", path), make("span", "soft", operation.summary));
  const details = make("details", "operation", summary);
  details.dataset.words = `${method} ${path} ${operation.summary}`.toLowerCase();
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(inside(path, method, operation));
  });
  return details;
}

function filter() {
  const words = place("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  let isAnyShown = false;
  for (const one of document.querySelectorAll("#operations section")) {
    let isShown = false;
    for (const details of one.querySelectorAll(".operation")) {
      details.hidden = !words.every((word) => details.dataset.words.includes(word));
      isShown ||= !details.hidden;
    }
    one.hidden = !isShown;
    isAnyShown ||= isShown;
  }
  place("nothing").hidden = isAnyShown || !api;
}

function inside(path, method, operation) {
  const shown = make("div", "inside");
  const content = operation.requestBody?.content ?? {};
  const [media] = Object.keys(content);
  if (media) {
    shown.append(make("h4", "", `Body, ${media}`), fields(objectIn(api, content[media].schema)));
  }
  for (const [status, answer] of Object.entries(operation.responses)) {
    const types = Object.keys(answer.content ?? {});
    const object = objectIn(api, answer.content?.[JSON_TYPE]?.schema ?? {});
    const name = status === "default" ? "Any other answer" : `Answer ${status}`;
    shown.append(make("h4", "", `${name}, ${types.join(" or ")}`));
    if (object) shown.append(fields(object));
  }
  shown.append(trial(path, method, operation, media, content[media]?.schema));
  return shown;
}

/** Show the fields of an object; nested objects can be opened. */
function fields(object) {
  const list = make("div", "fields");
  const named = { ...object?.properties, ...object?.["x-triolet-more"] };
  for (const [name, schema] of Object.entries(named)) {
    const words = [make("span", "field-name", name), " ", make("span", "field-type", typeText(api, schema))];
    const more = [boundsText(schema), schema.description].filter(Boolean).join("; ");
    if (object.required?.includes(name)) words.push(" ", make("span", "needed", "required"));
    if (more) words.push(" ", make("span", "soft", more));
    const inner = objectIn(api, schema);
    if (!inner) {
      list.append(make("div", "", ...words));
      continue;
    }
    const details = make("details", "", make("summary", "", ...words));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(fields(inner));
    });
    list.append(details);
  }
  if (!list.childElementCount) list.append(make("div", "soft", "No documented fields."));
  return list;
}

/** Make the form that sends a request and shows the answer. */
function trial(path, method, operation, media, schema) {
  if (media && media !== JSON_TYPE) return make("p", "soft", `Send a body of ${media} with a program such as curl.`);
  const form = make("form", "try", make("h4", "", "Try it"));
  const inputs = (operation.parameters ?? []).map((parameter) => {
    const input = make("input");
    input.name = parameter.name;
    input.required = parameter.required;
    input.value = parameter.required ? alternatives(resolve(api, parameter.schema)).flatMap((one) => one.enum ?? [])[0] ?? "" : "";
    form.append(make("label", "", parameter.name, " ", input));
    return { parameter, input };
  });
  const body = media ? make("textarea") : null;
  if (body) {
    body.value = JSON.stringify(example(api, schema), null, 2);
    body.spellcheck = false;
    body.id = `body-${++opened}`;
    const label = make("label", "", "Body");
    label.htmlFor = body.id;
    form.append(label, body);
  }
  const send = make("button", "", "Send");
  const stop = make("button", "", "Stop");
  stop.type = "button";
  stop.hidden = true;
  const outcome = make("div", "outcome");
  outcome.setAttribute("aria-live", "polite");
  form.append(make("p", "buttons", send, stop), outcome);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const control = new AbortController();
    stop.onclick = () => control.abort();
    send.disabled = true;
    stop.hidden = false;
    ask(address(path, inputs), method, body?.value, outcome, control.signal).finally(() => {
      send.disabled = false;
      stop.hidden = true;
    });
  });
  return form;
}

function address(path, inputs) {
  const query = new URLSearchParams();
  let filled = path;
  for (const { parameter, input } of inputs) {
    if (parameter.in === "path") filled = filled.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(parameter.name, input.value);
  }
  return query.size ? `${filled}?${query}` : filled;
}

async function ask(target, method, body, outcome, signal) {
  const status = make("p", "soft", "Waiting…");
  const shown = make("pre");
  outcome.replaceChildren(status, shown);
  const headers = { ...keyHeaders(keptKey()), ...(body === undefined ? {} : { "content-type": JSON_TYPE }) };
  try {
    const answer = await fetch(target, { method: method.toUpperCase(), headers, body, signal, cache: "no-store" });
    const named = [...answer.headers].filter(([name]) => name.startsWith("x-") || name.startsWith("retry-"));
    status.textContent = [`${answer.status} ${answer.statusText}`, ...named.map(([name, value]) => `${name}: ${value}`)].join(" · ");
    await showBody(answer, shown);
  } catch (error) {
    status.textContent += signal.aborted ? " · stopped" : ` · no answer: ${error.message}`;
  }
}

/** Show an answer while it arrives; format JSON once it is complete. */
async function showBody(answer, shown) {
  const decoder = new TextDecoder();
  let text = "";
  for (let reader = answer.body?.getReader(), part; reader && !(part = await reader.read()).done; ) {
    text += decoder.decode(part.value, { stream: true });
    if (text.length > MOST_SHOWN) {
      await reader.cancel();
      shown.textContent = `${text.slice(0, MOST_SHOWN)}\n… and more`;
      return;
    }
    shown.textContent = text;
  }
  if (!answer.headers.get("content-type")?.startsWith(JSON_TYPE)) return;
  try {
    shown.textContent = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    shown.textContent = text; // declared as JSON but invalid: shown as received
  }
}
