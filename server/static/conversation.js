// What was said: questions and their answers, the model's input made from them, and the record that
// is kept of it all. Knows no socket, no storage and no page.

import { Answer, AnswerState } from "./answer.js";

const LONGEST_TITLE = 60; // characters; a row of the list shows fewer

export class Conversation {
  #id;
  #title;
  #changedMs;
  #turns;

  /** @type {string|null} the model that the reader picked for it. */
  model = null;

  /** @param {{id: string, title?: string, changedMs?: number, turns?: object[], model?: string}} record what was kept. */
  constructor({ id, title = "", changedMs = 0, turns = [], model = null }) {
    this.#id = id;
    this.model = typeof model === "string" ? model : null;
    this.#title = title;
    this.#changedMs = changedMs;
    this.#turns = turns.map(({ question, answer }) => ({ question, answer: answer && Answer.from(answer) }));
  }

  get id() {
    return this.#id;
  }

  get title() {
    return this.#title;
  }

  get turns() {
    return this.#turns;
  }

  get isEmpty() {
    return this.#turns.length === 0;
  }

  get last() {
    return this.#turns.at(-1);
  }

  /** Whether an answer is under way. */
  get isAnswering() {
    return this.last?.answer?.isOver === false;
  }

  /** Add a question. @returns the new turn. */
  add(question, nowMs) {
    if (this.isEmpty) this.#title = shortened(question);
    const turn = { question, answer: null };
    this.#turns.push(turn);
    this.#changedMs = nowMs;
    return turn;
  }

  /** Ask something else in the place of the last question. */
  replaceLast(question, nowMs) {
    if (this.#turns.length === 1 && this.#title === shortened(this.last.question)) {
      this.#title = shortened(question);
    }
    Object.assign(this.last, { question, answer: null });
    this.#changedMs = nowMs;
  }

  rename(title) {
    this.#title = shortened(title) || this.#title;
  }

  /** Let the last answer go on. @returns {Answer|null} null where there is nothing to go on with. */
  resumeLast(note) {
    const kept = this.last?.answer?.record();
    if (!kept || kept.state !== AnswerState.STOPPED) return null;
    this.last.answer = Answer.resumed(kept, note);
    return this.last.answer;
  }

  /** What is kept of it; an answer that is under way counts as stopped here. */
  record() {
    const turns = this.#turns.map(({ question, answer }) => ({ question, answer: answer && answer.record() }));
    const { model } = this;
    return { id: this.#id, title: this.#title, changedMs: this.#changedMs, turns, ...(model && { model }) };
  }

  /**
   * The whole input for answering the last question.
   *
   * Earlier turns whose answer is empty (it failed, or was stopped before it began) are left out with
   * their question: chat templates want questions and answers to alternate.
   */
  input() {
    const earlier = this.#turns.slice(0, -1).filter(({ answer }) => answer?.text);
    const messages = earlier.flatMap(({ question, answer }) => [
      message("user", question),
      ...(answer.reasoning ? [reasoning(answer.reasoning)] : []),
      message("assistant", answer.text),
    ]);
    return [...messages, message("user", this.last.question)];
  }
}

function message(role, content) {
  return { type: "message", role, content };
}

function reasoning(text) {
  return { type: "reasoning", summary: [], content: [{ type: "reasoning_text", text }] };
}

function shortened(text) {
  const characters = [...text.replace(/\s+/g, " ").trim()]; // not halves of what UTF-16 cuts in two
  return characters.length > LONGEST_TITLE ? `${characters.slice(0, LONGEST_TITLE - 1).join("")}…` : characters.join("");
}
