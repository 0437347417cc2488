// A conversation: questions and answers, the model's input made from them, and the record to store.

import { Answer, AnswerState } from "./answer.js";

const LONGEST_TITLE = 60; // characters; a row of the list shows fewer

export class Conversation {
  #id;
  #title;
  #changedMs;
  #turns;

  /** @type {string|null} the model that the user picked for it. */
  model = null;

  /** @param {{id: string, title?: string, changedMs?: number, turns?: object[], model?: string}} record the stored record. */
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

  /** Whether an answer is running. */
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

  /** Replace the last question. */
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

  /** Continue the last answer. @returns {Answer|null} null if it cannot continue. */
  resumeLast(note) {
    const kept = this.last?.answer?.record();
    if (!kept || kept.state !== AnswerState.STOPPED) return null;
    this.last.answer = Answer.resumed(kept, note);
    return this.last.answer;
  }

  /** The record to store; a running answer is stored as stopped. */
  record() {
    const turns = this.#turns.map(({ question, answer }) => ({ question, answer: answer && answer.record() }));
    const { model } = this;
    return { id: this.#id, title: this.#title, changedMs: this.#changedMs, turns, ...(model && { model }) };
  }

  /**
   * The whole input for answering the last question.
   *
   * Earlier turns with an empty answer (failed, or stopped too early) are left out with
   * their question, because chat templates require alternating turns.
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
  const characters = [...text.replace(/\s+/g, " ").trim()]; // no halves of surrogate pairs
  return characters.length > LONGEST_TITLE ? `${characters.slice(0, LONGEST_TITLE - 1).join("")}…` : characters.join("");
}
