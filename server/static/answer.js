// The state machine of one answer: takes the server's events, from sending the question to its end.

import { Meter } from "./stats.js";

export const AnswerState = Object.freeze({
  WAITING: "waiting", // for the connection, the queue and the prefill
  STREAMING: "streaming",
  DONE: "done",
  STOPPED: "stopped", // by the user
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
const REASONS = { max_output_tokens: "length" }; // the Responses API's reason, and the page's

/** Return whether this event is the last one of a response. */
export function endsResponse(event) {
  return TERMINAL_EVENTS.has(event.type);
}

export class Answer {
  #state = WAITING;
  #text = "";
  #reasoning = "";
  #model = null;
  #meter = null;
  #figures = null; // of a stored answer
  #lane = undefined;
  #responseId = null;
  #position = null;
  #isInterrupted = false;
  #error = null;
  #finishReason = null;

  /** Restore an answer from its stored record. */
  static from({ state, text, reasoning, model, error, finishReason, figures }) {
    const answer = new Answer();
    answer.#state = state === DONE || state === FAILED ? state : STOPPED;
    answer.#text = text;
    answer.#reasoning = typeof reasoning === "string" ? reasoning : "";
    answer.#model = typeof model === "string" ? model : null;
    answer.#error = answer.#state === FAILED ? { ...error } : null;
    answer.#finishReason = typeof finishReason === "string" ? finishReason : null;
    answer.#figures = figures ?? null;
    return answer;
  }

  /** Restore an answer that continues after a reload. */
  static resumed(kept, { lane, responseId, position }) {
    const answer = Answer.from(kept);
    answer.#state = answer.#text || answer.#reasoning ? STREAMING : WAITING;
    answer.#lane = lane;
    answer.#responseId = responseId;
    answer.#position = position;
    answer.#isInterrupted = true;
    answer.#meter = new Meter(null, answer.#figures);
    return answer;
  }

  /** Its position, for a page that continues it. */
  get whereabouts() {
    return { lane: this.#lane, responseId: this.#responseId, position: this.#position };
  }

  /** The record to store. */
  record() {
    const state = this.isOver ? this.#state : STOPPED;
    const { code, status, message } = this.#error ?? {};
    const error = this.#error && { code, status, message };
    const reasoning = this.#reasoning || undefined;
    const { model, finishReason, figures } = this;
    return { state, text: this.#text, reasoning, model, error, finishReason, figures };
  }

  get state() {
    return this.#state;
  }

  get text() {
    return this.#text;
  }

  /** The model's reasoning, or an empty string. */
  get reasoning() {
    return this.#reasoning;
  }

  /** The model's name, null until it is known. */
  get model() {
    return this.#model;
  }

  /** Its figures, null until the question has left. */
  get figures() {
    return this.#meter?.figures() ?? this.#figures;
  }

  /** The stream_id that its events carry, undefined until the question has left. */
  get lane() {
    return this.#lane;
  }

  /** The error, null unless it failed. */
  get error() {
    return this.#error;
  }

  /** Why it ended: "stop", "length" or another word of the server's; null unless it is done. */
  get finishReason() {
    return this.#finishReason;
  }

  get isOver() {
    return Object.keys(TRANSITIONS[this.#state]).length === 0;
  }

  /** Whether its connection is lost and another one may continue it. */
  get isInterrupted() {
    return this.#isInterrupted;
  }

  /** Whether the server has sent the response id that is needed to resume. */
  get canResume() {
    return this.#responseId !== null;
  }

  /** Set the model. */
  spokenBy(model) {
    this.#model = model;
  }

  /** Record that the question is sent now, which starts the time to the first token. */
  sent(lane, nowMs) {
    this.#lane = lane;
    this.#meter = new Meter(nowMs);
  }

  /** Record that the connection is lost. */
  interrupt() {
    this.#isInterrupted = true;
  }

  /** @returns {object} the message that requests the missing rest. */
  resumption() {
    this.#isInterrupted = false;
    const request = { type: "response.resume", response_id: this.#responseId, stream_id: this.#lane };
    return this.#position === null ? request : { ...request, sequence_number: this.#position };
  }

  /** Handle an event of the server. */
  receive(event, nowMs) {
    this.note(event);
    switch (event.type) {
      case "response.output_text.delta":
        if (event.delta) this.#append(event.delta, nowMs);
        break;
      case "response.reasoning_text.delta":
        if (event.delta) this.#think(event.delta, nowMs);
        break;
      case "response.completed":
      case "response.incomplete":
        this.#step("complete");
        this.count(event, nowMs);
        this.#finishReason = reasonOf(event.response);
        break;
      case "response.failed":
        this.fail({ status: 500, ...event.response.error, code: event.response.error.type });
        this.count(event, nowMs);
        break;
      case "error":
        this.fail({ status: event.status, ...(event.error ?? event) });
        break;
    }
  }

  /** Store the position of the last event, to resume from there. */
  note({ type, sequence_number, response }) {
    if (type === "error") return;
    this.#responseId ??= response?.id ?? null;
    this.#position = sequence_number ?? this.#position;
  }

  /** Read the token count of a terminal event, also after a stop. */
  count(event, nowMs) {
    this.#meter.end(nowMs, event.response?.usage);
  }

  stop() {
    this.#step("stop");
  }

  /** @param {{code?: string, message?: string, status?: number}} error */
  fail(error) {
    this.#step("fail");
    this.#error = error;
  }

  #think(piece, nowMs) {
    this.#step("text");
    this.#reasoning += piece;
    this.#meter.piece(nowMs);
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

function reasonOf({ incomplete_details }) {
  const reason = incomplete_details?.reason;
  return reason ? (REASONS[reason] ?? reason) : "stop";
}
