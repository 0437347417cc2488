// The actions in a chat: ask, stop, regenerate, edit. Connects conversations, the connection and the
// view. Answers continue when another conversation is shown, and after a reconnect.

import { Answer, endsResponse } from "./answer.js";

const CONNECT_WAIT_MS = 10_000; // after that the question fails
const MESSAGE_TOO_BIG = 1009; // the WebSocket's close code

export class Chat {
  #connection;
  #model;
  #view;
  #parameters;
  #onChange;
  #conversation = null; // the one that is shown
  #open = new Map(); // by stream_id: answers that the server has not ended, including stopped ones
  #lanes = 0;
  #isServerLeaving = false;

  /**
   * @param {Connection} connection
   * @param {{name: (picked: string|null) => Promise<string|null>}} model the model to ask.
   * @param {View} view
   * @param {() => object} parameters the fields of each request.
   * @param {(conversation: Conversation) => void} onChange called when one has grown, or its answer ended.
   */
  constructor(connection, model, view, parameters, onChange) {
    this.#connection = connection;
    this.#model = model;
    this.#view = view;
    this.#parameters = parameters;
    this.#onChange = onChange;
  }

  /** Show another conversation; running answers continue. */
  show(conversation) {
    this.#conversation = conversation;
    this.#view.show(conversation);
  }

  /** The model picked for the shown conversation, or null. */
  get model() {
    return this.#conversation?.model ?? null;
  }

  /** Set the model of the shown conversation. */
  pick(model) {
    this.#conversation.model = model;
    if (!this.#conversation.isEmpty) this.#onChange(this.#conversation);
  }

  /** Ask a question, unless an answer is running. @returns {boolean} whether it was accepted. */
  ask(question) {
    if (this.#conversation.isAnswering || !question.trim()) return false;
    this.#view.addTurn(this.#conversation.add(question.trim(), Date.now()));
    this.#begin();
    return true;
  }

  /** Replace the last question. @returns {boolean} whether it was accepted. */
  askInstead(question) {
    if (this.#conversation.isAnswering || this.#conversation.isEmpty || !question.trim()) return false;
    this.#conversation.replaceLast(question.trim(), Date.now());
    this.#view.replaceTurn(this.#conversation.last);
    this.#begin();
    return true;
  }

  /** Answer the last question again. */
  regenerate() {
    if (this.#conversation.isAnswering || this.#conversation.isEmpty) return;
    this.#begin();
  }

  /** Stop the running answer and keep its text. */
  stop(conversation = this.#conversation) {
    if (!conversation.isAnswering) return;
    const { answer } = conversation.last;
    if (answer.lane) this.#cancel(answer);
    answer.stop();
    this.#ended(answer, conversation);
  }

  /**
   * Suspend before a reload. Answers without a response id end here.
   *
   * @returns {object[]} the arguments of `resume`, for each answer that can continue.
   */
  leave() {
    const notes = [];
    for (const { answer, conversation } of [...this.#open.values()]) {
      if (answer.isOver) continue;
      if (answer.canResume) {
        notes.push({ chat: conversation.id, ...answer.whereabouts });
        this.#onChange(conversation);
      } else if (conversation.last?.answer === answer) {
        this.stop(conversation);
      }
    }
    return notes;
  }

  /** Continue the last answer of a conversation after a reload. */
  resume(conversation, note) {
    const answer = conversation.resumeLast(note);
    if (!answer) return;
    this.#lanes = Math.max(this.#lanes, Number(note.lane.split("-")[1]) || 0);
    this.#open.set(note.lane, { answer, conversation, request: {} });
  }

  /** Handle an event of the server. */
  receive(event) {
    const now = performance.now();
    if (event.type === "notice") this.#noticed(event);
    const lane = event.stream_id ?? this.#shownLane; // events without a lane concern the connection
    const entry = this.#open.get(lane);
    if (!entry) return;
    const { answer, conversation } = entry;
    if (endsResponse(event)) this.#open.delete(lane);
    if (answer.isOver) {
      this.#receiveLate(entry, event, now);
    } else if (isWithoutRoomToResume(event) && entry.request.resumable) {
      this.#send(entry, { ...entry.request, resumable: false });
    } else {
      answer.receive(named(event, answer), now);
      if (answer.isOver) this.#ended(answer, conversation);
      else if (conversation === this.#conversation) this.#view.showAnswer(answer);
    }
    this.#renewIfIdle();
  }

  /** Handle a lost connection: answers with a response id continue on the next one, others are lost. */
  lost(closeCode) {
    this.#isServerLeaving = false;
    for (const [lane, { answer, conversation }] of this.#open) {
      if (answer.canResume && closeCode !== MESSAGE_TOO_BIG) {
        answer.interrupt();
        if (conversation === this.#conversation) this.#view.showAnswer(answer);
        continue;
      }
      this.#open.delete(lane);
      if (answer.isOver) continue;
      answer.fail(closeCode === MESSAGE_TOO_BIG ? { status: 413 } : { code: "connection_lost" });
      this.#ended(answer, conversation);
    }
  }

  /** Handle a new connection. */
  reconnected() {
    for (const { answer, conversation } of this.#open.values()) {
      if (!answer.isInterrupted) continue;
      this.#connection.send(answer.resumption());
      if (answer.isOver) this.#cancel(answer); // stopped while there was no connection
      else if (conversation === this.#conversation) this.#view.showAnswer(answer);
    }
  }

  get #shownLane() {
    return this.#conversation.isAnswering ? this.#conversation.last.answer.lane : undefined;
  }

  async #begin() {
    const conversation = this.#conversation;
    const answer = new Answer();
    conversation.last.answer = answer;
    this.#view.startAnswer(answer);
    this.#onChange(conversation);
    const isOpen = await this.#connection.whenOpen(CONNECT_WAIT_MS);
    const model = (isOpen && (await this.#model.name(conversation.model))) || undefined;
    if (answer.isOver) return; // stopped in the meantime
    answer.spokenBy(model ?? null);
    if (conversation === this.#conversation) this.#view.showAnswer(answer);
    const input = conversation.input();
    const request = { type: "response.create", model, input, store: false, resumable: true };
    this.#send({ answer, conversation }, { ...request, ...this.#parameters() });
  }

  #send({ answer, conversation }, request) {
    // A new lane for each try, so that late events of a stopped one are not confused with it.
    const lane = `answer-${++this.#lanes}`;
    if (this.#connection.send({ ...request, stream_id: lane })) {
      answer.sent(lane, performance.now());
      this.#open.set(lane, { answer, conversation, request });
      return;
    }
    answer.fail({ code: this.#connection.isRefused ? "invalid_api_key" : "unreachable" });
    this.#ended(answer, conversation);
  }

  #cancel(answer) {
    this.#connection.send({ type: "response.cancel", stream_id: answer.lane });
  }

  #receiveLate({ answer, conversation }, event, now) {
    answer.note(event);
    if (!endsResponse(event)) return;
    answer.count(event, now);
    // If it was regenerated or followed by another turn, its figures are not needed.
    if (conversation.last?.answer !== answer) return;
    this.#onChange(conversation);
    if (conversation === this.#conversation) this.#view.showAnswer(answer);
  }

  #ended(answer, conversation) {
    if (conversation === this.#conversation) this.#view.endAnswer(answer);
    this.#onChange(conversation);
  }

  #noticed({ code }) {
    this.#isServerLeaving ||= code === "draining";
    this.#renewIfIdle();
  }

  /** Reconnect when the server drains: its successor has the same address. */
  #renewIfIdle() {
    if (!this.#isServerLeaving || this.#open.size > 0) return;
    this.#isServerLeaving = false;
    this.#connection.renew();
  }
}

/** Return the event, or a connection error if it says that the rest is no longer available. */
function named(event, answer) {
  const isGone = event.type === "error" && answer.canResume && [404, 410].includes(event.status);
  return isGone ? { ...event, error: { code: "connection_lost" } } : event;
}

/** Whether the server refuses only to keep the answer for another connection. */
function isWithoutRoomToResume({ type, error }) {
  return type === "error" && error?.code === "overloaded" && error.param === "resumable";
}
