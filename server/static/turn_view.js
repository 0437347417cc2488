// Shows one turn: question, reasoning, answer while it grows, figures and ending. Text goes into text
// nodes only, so that no text becomes markup.

import { AnswerState } from "./answer.js";
import { copyText } from "./copying.js";
import { Remedy, explain } from "./errors.js";
import { GrowingText } from "./growing_text.js";

const REMEDY_LABELS = { [Remedy.RETRY]: "Try again", [Remedy.NEW_CHAT]: "Start a new chat" };
const ENDINGS = { stop: "", length: "Reached the length limit" };
const wholeNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDecimal = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export class TurnView {
  #root;
  #text = null;
  #parts;
  #answer = null;

  /**
   * @param {HTMLTemplateElement} template
   * @param {string} question
   * @param {{onRegenerate: () => void, onEdit: (question: string) => void, onNewChat: () => void}} deeds
   */
  constructor(template, question, { onRegenerate, onEdit, onNewChat }) {
    this.#root = template.content.firstElementChild.cloneNode(true);
    const part = (selector) => this.#root.querySelector(selector);
    part(".question .text").textContent = question;
    this.#parts = {
      answer: part(".answer"),
      role: part(".role"),
      reasoning: part(".reasoning"),
      reasoningTitle: part(".reasoning summary"),
      thoughts: part(".thoughts"),
      text: part(".answer .text"),
      problem: part(".problem"),
      title: part(".problem-title"),
      advice: part(".problem-advice"),
      remedy: part(".remedy"),
      ending: part(".ending"),
      ttft: part(".ttft"),
      speed: part(".speed"),
      tokens: part(".tokens"),
      prompt: part(".prompt"),
      reason: part(".reason"),
      copy: part(".copy"),
    };
    part(".regenerate").onclick = onRegenerate;
    part(".edit").onclick = () => onEdit(question);
    this.#parts.copy.onclick = () => copyText(this.#parts.copy, this.#answer.text);
    this.#parts.copy.hidden = !navigator.clipboard; // only on secure pages and localhost
    this.#parts.text.addEventListener("click", ({ target }) => {
      const button = target.closest(".copy-code");
      if (button) copyText(button, button.closest(".code").querySelector("pre").textContent);
    });
    this.#parts.remedy.onclick = () => {
      const { remedy } = explain(this.#answer.error);
      (remedy === Remedy.NEW_CHAT ? onNewChat : onRegenerate)();
    };
  }

  get root() {
    return this.#root;
  }

  /** Show the state of the answer; a different answer starts empty. */
  show(answer) {
    if (answer !== this.#answer) {
      this.#parts.text.replaceChildren();
      this.#text = new GrowingText(this.#parts.text);
    }
    this.#answer = answer;
    if (answer.model) fill(this.#parts.role, answer.model);
    this.#parts.answer.dataset.state = answer.state;
    this.#parts.answer.setAttribute("aria-busy", String(!answer.isOver));
    this.#showReasoning(answer);
    this.#text.show(answer.text);
    this.#showFigures(answer);
    this.#showEnding(answer);
    this.#showProblem(answer);
  }

  #showReasoning({ reasoning, text, isOver }) {
    const { reasoning: details, reasoningTitle, thoughts } = this.#parts;
    details.hidden = !reasoning;
    fill(reasoningTitle, text || isOver ? "Reasoning" : "Thinking…");
    const [shown] = thoughts.childNodes;
    if (shown && reasoning.startsWith(shown.data)) shown.appendData(reasoning.slice(shown.data.length));
    else thoughts.textContent = reasoning;
  }

  #showFigures({ figures, isOver, finishReason }) {
    const { ttft, speed, tokens, prompt, reason } = this.#parts;
    const hasBegun = figures !== null && (figures.ttftMs !== null || figures.tokens > 0);
    fill(ttft, hasBegun && figures.ttftMs !== null && `${wholeNumber.format(figures.ttftMs)} ms`);
    fill(speed, hasBegun && figures.tokensPerSecond !== null && `${rate(figures.tokensPerSecond)} tokens/s`);
    fill(tokens, hasBegun && count(figures));
    fill(prompt, hasBegun && isOver && figures.promptTokens !== null && promptWords(figures));
    fill(reason, hasBegun && finishReason);
  }

  #showEnding(answer) {
    const { ending } = this.#parts;
    const word = ENDINGS[answer.finishReason] ?? (answer.finishReason && `Ended: ${answer.finishReason}`);
    const isWaiting = answer.isInterrupted && !answer.isOver && "Connection lost; continues after reconnecting";
    fill(ending, isWaiting || (answer.state === AnswerState.STOPPED ? "Stopped" : word));
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
}

function fill(element, text) {
  const shown = text || "";
  if (element.textContent !== shown) element.textContent = shown;
}

function rate(tokensPerSecond) {
  return (tokensPerSecond < 100 ? oneDecimal : wholeNumber).format(tokensPerSecond);
}

function count(figures) {
  const bound = figures.isExact ? "" : "≥ "; // a piece of text has at least one token
  return `${bound}${wholeNumber.format(figures.tokens)} ${figures.tokens === 1 ? "token" : "tokens"}`;
}

function promptWords({ promptTokens, cachedTokens }) {
  const cached = cachedTokens > 0 ? `, ${wholeNumber.format(cachedTokens)} cached` : "";
  return `${wholeNumber.format(promptTokens)}${cached}`;
}
