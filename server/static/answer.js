// One answer of the model, from the question sent to its one end. Reads the server's events; knows
// no socket and no page.

import { Meter } from "./stats.js";

export const AnswerState = Object.freeze({
  WAITING: "waiting", // for the connection, the queue and the prefill
  STREAMING: "streaming",
  DONE: "done",
  STOPPED: "stopped", // by the reader
  FAILED: "failed",
});

const { WAITING, STREAMING, DONE, STOPPED, FAILED } = AnswerState;

export const TRANSITIONS = Object.freeze({
  [WAITING]: { text: STREAMING, complete: DONE, stop: STOPPED, fail: FAILED },
  [STREAMING]: { text: STREAMING, complete: DONE, stop: STOPPED, fail: FAILED },
  [DONE]: {},
  [STOPPED]: {},
  [FAILED]: {},
});

const TERMINAL_EVENTS = new Set(["response.completed", "response.incomplete", "response.failed", "error"]);

/** Say whether the server sends nothing more for a response after this event. */
export function endsResponse(event) {
  return TERMINAL_EVENTS.has(event.type);
}

export class Answer {
  #state = WAITING;
  #text = "";
  #meter = null;
  #lane = undefined;
  #error = null;
  #isCut = false;

  get state() {
    return this.#state;
  }

  get text() {
    return this.#text;
  }

  /** Its figures, null until the question has left. */
  get meter() {
    return this.#meter;
  }

  /** The stream_id that its events carry, undefined until the question has left. */
  get lane() {
    return this.#lane;
  }

  /** What went wrong, null unless it failed. */
  get error() {
    return this.#error;
  }

  /** Whether it ended at the length limit rather than by itself. */
  get isCut() {
    return this.#isCut;
  }

  get isOver() {
    return Object.keys(TRANSITIONS[this.#state]).length === 0;
  }

  /** The question leaves now: the clock for the first token starts. */
  sent(lane, nowMs) {
    this.#lane = lane;
    this.#meter = new Meter(nowMs);
  }

  /** Take in an event of the server. */
  receive(event, nowMs) {
    switch (event.type) {
      case "response.output_text.delta":
        if (event.delta) this.#append(event.delta, nowMs);
        break;
      case "response.completed":
      case "response.incomplete":
        this.#step("complete");
        this.count(event, nowMs);
        this.#isCut = event.response.incomplete_details?.reason === "max_output_tokens";
        break;
      case "response.failed":
        this.fail({ status: 500, ...event.response.error, code: event.response.error.type });
        break;
      case "error":
        this.fail({ status: event.status, ...(event.error ?? event) });
        break;
    }
  }

  /** Take the token count out of a terminal event, also of one that comes after a stop. */
  count(event, nowMs) {
    this.#meter.end(nowMs, event.response?.usage?.output_tokens);
  }

  stop() {
    this.#step("stop");
  }

  /** @param {{code?: string, message?: string, status?: number}} error */
  fail(error) {
    this.#step("fail");
    this.#error = error;
  }

  #append(piece, nowMs) {
    this.#step("text");
    this.#text += piece;
    this.#meter.piece(nowMs);
  }

  #step(event) {
    const next = TRANSITIONS[this.#state][event];
    if (!next) throw new Error(`an answer that is ${this.#state} cannot take "${event}"`);
    this.#state = next;
  }
}
