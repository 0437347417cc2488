// Turns what went wrong into words that say what to do. Knows the server's error codes and no page.

export const Remedy = Object.freeze({ RETRY: "retry", NEW_CHAT: "new-chat", NONE: "none" });

const TOO_LONG = {
  title: "This chat has grown too long for the model.",
  advice: "Start a new chat, or ask something shorter.",
  remedy: Remedy.NEW_CHAT,
};
const BUSY = {
  title: "The server is busy.",
  advice: "Every place is taken right now.",
  remedy: Remedy.RETRY,
};
const BROKEN = {
  title: "Something went wrong on the server.",
  advice: "If it happens once more, the server's log says why.",
  remedy: Remedy.RETRY,
};

const BY_CODE = {
  context_length_exceeded: TOO_LONG,
  overloaded: BUSY,
  server_error: BROKEN,
  draining: {
    title: "The server is about to restart.",
    advice: "It takes no new questions until it is back.",
    remedy: Remedy.RETRY,
  },
  no_worker: {
    title: "The model is not available right now.",
    advice: "Its workers are starting or restarting.",
    remedy: Remedy.RETRY,
  },
  deadline_exceeded: {
    title: "The answer took too long.",
    advice: "The server gave up on it; asking for less may help.",
    remedy: Remedy.RETRY,
  },
  request_timeout: {
    title: "The answer was ended because this page stopped reading it.",
    advice: "That happens to pages that sleep in the background.",
    remedy: Remedy.RETRY,
  },
  rate_limit_exceeded: {
    title: "Too many questions in a short time.",
    advice: "The server has a limit per minute.",
    remedy: Remedy.RETRY,
  },
  insufficient_quota: {
    title: "The quota is used up.",
    advice: "Ask whoever runs this server for more.",
    remedy: Remedy.NONE,
  },
  connection_lost: {
    title: "The connection broke before the answer was complete.",
    advice: "The server does not have the rest of it any more. The page reconnects by itself; then ask again.",
    remedy: Remedy.RETRY,
  },
  websocket_stream_limit_reached: {
    title: "Too many answers are under way on this page.",
    advice: "Wait until one of them has ended, or stop one.",
    remedy: Remedy.RETRY,
  },
  model_not_found: {
    title: "The server does not serve the chosen model.",
    advice: "Choose another one in the settings, or leave the choice to the server.",
    remedy: Remedy.RETRY,
  },
  quarantined: {
    title: "The server refuses this question for a while.",
    advice: "It made workers fail. Ask differently, or tell whoever runs the server.",
    remedy: Remedy.NONE,
  },
  invalid_api_key: {
    title: "The server refuses the API key.",
    advice: "Enter a valid one in the settings, then ask again.",
    remedy: Remedy.RETRY,
  },
  unreachable: {
    title: "The server cannot be reached.",
    advice: "See whether it is running and this machine is online.",
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
