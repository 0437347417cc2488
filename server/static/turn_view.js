// Shows one turn: a question, its answer as it grows and then with its form, its figures, its end.
// Text goes into text nodes only, so that nothing a model or a reader writes becomes markup.

import { AnswerState } from "./answer.js";
import { Remedy, explain } from "./errors.js";
import { renderMarkdown } from "./markdown.js";

const COPIED_FOR_MS = 1_500;
const REMEDY_LABELS = { [Remedy.RETRY]: "Try again", [Remedy.NEW_CHAT]: "Start a new chat" };
const wholeNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDecimal = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export class TurnView {
  #root;
  #text;
  #parts;
  #answer = null;

  /**
   * @param {HTMLTemplateElement} template
   * @param {string} question
   * @param {{onRegenerate: () => void, onNewChat: () => void}} deeds
   */
  constructor(template, question, { onRegenerate, onNewChat }) {
    this.#root = template.content.firstElementChild.cloneNode(true);
    const part = (selector) => this.#root.querySelector(selector);
    part(".question .text").textContent = question;
    this.#text = document.createTextNode("");
    part(".answer .text").append(this.#text);
    this.#parts = {
      answer: part(".answer"),
      text: part(".answer .text"),
      problem: part(".problem"),
      title: part(".problem-title"),
      advice: part(".problem-advice"),
      remedy: part(".remedy"),
      ending: part(".ending"),
      ttft: part(".ttft"),
      speed: part(".speed"),
      tokens: part(".tokens"),
      copy: part(".copy"),
    };
    part(".regenerate").onclick = onRegenerate;
    this.#parts.copy.onclick = () => this.#copy();
    this.#parts.copy.hidden = !navigator.clipboard; // only secure pages and localhost have one
    this.#parts.remedy.onclick = () => {
      const { remedy } = explain(this.#answer.error);
      (remedy === Remedy.NEW_CHAT ? onNewChat : onRegenerate)();
    };
  }

  get root() {
    return this.#root;
  }

  /** Show the state of the answer; another answer than last time starts from nothing. */
  show(answer) {
    if (answer !== this.#answer) {
      this.#text.data = "";
      this.#parts.text.replaceChildren(this.#text);
      this.#parts.text.classList.remove("is-whole");
    }
    this.#answer = answer;
    this.#parts.answer.dataset.state = answer.state;
    this.#parts.answer.setAttribute("aria-busy", String(!answer.isOver));
    // Appending leaves the reader's selection alone and costs only what is new.
    this.#text.appendData(answer.text.slice(this.#text.length));
    if (answer.isOver) this.#showWhole();
    this.#showFigures(answer);
    this.#showEnding(answer);
    this.#showProblem(answer);
  }

  /** Show an answer that is over with its headings, lists and code; one without any stays as it is. */
  #showWhole() {
    const { text } = this.#parts;
    if (text.classList.contains("is-whole")) return;
    const whole = renderMarkdown(this.#answer.text);
    if (whole.querySelector(":not(p)") === null) return;
    text.replaceChildren(whole);
    text.classList.add("is-whole");
  }

  #showFigures({ meter, isOver }) {
    const { ttft, speed, tokens } = this.#parts;
    const hasBegun = meter !== null && meter.ttftMs !== null;
    fill(ttft, hasBegun && `${wholeNumber.format(meter.ttftMs)} ms`);
    fill(speed, hasBegun && meter.tokensPerSecond !== null && `${rate(meter.tokensPerSecond)} tokens/s`);
    fill(tokens, hasBegun && count(meter, isOver));
  }

  #showEnding(answer) {
    const { ending } = this.#parts;
    fill(ending, answer.state === AnswerState.STOPPED ? "Stopped" : answer.isCut && "Reached the length limit");
    ending.hidden = !ending.textContent;
  }

  #showProblem(answer) {
    const { problem, title, advice, remedy } = this.#parts;
    problem.hidden = answer.error === null;
    if (problem.hidden) return;
    const told = explain(answer.error);
    title.textContent = told.title;
    advice.textContent = told.advice;
    remedy.hidden = told.remedy === Remedy.NONE;
    remedy.textContent = REMEDY_LABELS[told.remedy] ?? "";
  }

  async #copy() {
    const { copy } = this.#parts;
    try {
      await navigator.clipboard.writeText(this.#answer.text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => (copy.textContent = "Copy"), COPIED_FOR_MS);
  }
}

function fill(element, text) {
  const shown = text || "";
  if (element.textContent !== shown) element.textContent = shown;
}

function rate(tokensPerSecond) {
  return (tokensPerSecond < 100 ? oneDecimal : wholeNumber).format(tokensPerSecond);
}

function count(meter, isOver) {
  const bound = isOver && !meter.isExact ? "≥ " : "";
  return `${bound}${wholeNumber.format(meter.tokens)} ${meter.tokens === 1 ? "token" : "tokens"}`;
}
