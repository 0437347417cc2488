// Maps error codes of the server to a title, advice and a remedy for the user.

export const Remedy = Object.freeze({ RETRY: "retry", NEW_CHAT: "new-chat", NONE: "none" });

const TOO_LONG = {
  title: "This chat is too long for the model.",
  advice: "Start a new chat, or send a shorter question.",
  remedy: Remedy.NEW_CHAT,
};
const BUSY = {
  title: "The server is busy.",
  advice: "It is at capacity right now.",
  remedy: Remedy.RETRY,
};
const BROKEN = {
  title: "Something went wrong on the server.",
  advice: "If it happens again, check the server's log.",
  remedy: Remedy.RETRY,
};

const BY_CODE = {
  context_length_exceeded: TOO_LONG,
  overloaded: BUSY,
  server_error: BROKEN,
  draining: {
    title: "The server is about to restart.",
    advice: "It accepts no questions until it is back.",
    remedy: Remedy.RETRY,
  },
  no_worker: {
    title: "The model is not available right now.",
    advice: "Its workers are starting or restarting.",
    remedy: Remedy.RETRY,
  },
  deadline_exceeded: {
    title: "The answer took too long.",
    advice: "Its deadline passed; a shorter answer may help.",
    remedy: Remedy.RETRY,
  },
  request_timeout: {
    title: "The server ended the answer because this page stopped reading it.",
    advice: "Browsers may suspend pages in the background.",
    remedy: Remedy.RETRY,
  },
  rate_limit_exceeded: {
    title: "Too many questions in a short time.",
    advice: "The server limits questions per minute.",
    remedy: Remedy.RETRY,
  },
  insufficient_quota: {
    title: "The quota is used up.",
    advice: "Ask this server's operator for more.",
    remedy: Remedy.NONE,
  },
  connection_lost: {
    title: "The connection broke before the answer was complete.",
    advice: "The server no longer has the rest. The page reconnects by itself; then ask again.",
    remedy: Remedy.RETRY,
  },
  websocket_stream_limit_reached: {
    title: "Too many answers are running on this page.",
    advice: "Wait for one to finish, or stop one.",
    remedy: Remedy.RETRY,
  },
  model_not_found: {
    title: "The server does not serve the chosen model.",
    advice: "Choose another one in the settings, or the server's default.",
    remedy: Remedy.RETRY,
  },
  quarantined: {
    title: "The server refuses this question for a while.",
    advice: "It made workers fail. Rephrase it, or tell the server's operator.",
    remedy: Remedy.NONE,
  },
  invalid_api_key: {
    title: "The server refuses the API key.",
    advice: "Enter a valid one in the settings, then ask again.",
    remedy: Remedy.RETRY,
  },
  unreachable: {
    title: "The server cannot be reached.",
    advice: "Check that it is running and that this machine is online.",
    remedy: Remedy.RETRY,
  },
};

const BY_STATUS = { 413: TOO_LONG, 429: BY_CODE.rate_limit_exceeded, 503: BUSY, 504: BY_CODE.deadline_exceeded };

/**
 * Explain an error.
 *
 * @param {{code?: string, message?: string, status?: number, headers?: Record<string, string>}} error
 * @returns {{title: string, advice: string, remedy: string}}
 */
export function explain(error) {
  const known = BY_CODE[error.code] ?? BY_STATUS[error.status];
  if (known) return { ...known, advice: withWait(known, error.headers) };
  const isOurs = error.status >= 500 || !error.message;
  if (isOurs) return BROKEN;
  return { title: "The server refused this question.", advice: error.message, remedy: Remedy.RETRY };
}

function withWait({ advice, remedy }, headers) {
  const seconds = Math.ceil(Number(headers?.["retry-after"]));
  if (remedy !== Remedy.RETRY || !(seconds > 0)) return advice;
  return `${advice} It asks to wait about ${seconds} s.`;
}
