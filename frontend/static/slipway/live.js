// The live stream: one websocket, topics with the seq last seen, reconnect with backoff. What the socket did not bring
// (a gap, or everything while it is away) is read from GET /api/v1/events?topic=&after=.
//
// Emits on itself: "event" (detail: an envelope), "state" (detail: "live" | "slow" | "offline" | "paused"), "refresh".
// While paused, envelopes wait and are delivered in order on resume; beyond MAX_HELD only the seq is kept and
// `refresh` is emitted instead, because the page then reads everything again anyway.

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 15000;
const RETRY_TOPIC_MS = 4000;
const MAX_HELD = 500;
const POLL_MS = 5000;
const UNAUTHENTICATED = 4401;

export class LiveClient extends EventTarget {
  constructor({ url, topics }) {
    super();
    this.url = url;
    this.lastSeq = new Map(Object.entries(topics));
    this.delay = FIRST_DELAY_MS;
    this.paused = false;
    this.held = [];
    this.overflowed = false;
    this.connected = false;
    this.polling = false; // the socket is away and the events come by asking
    this.filling = new Map();
    this.socket = null;
  }

  start() {
    this.#connect();
    setInterval(() => this.#poll(), POLL_MS);
  }

  pause() {
    this.paused = true;
    this.#announce();
  }

  resume() {
    this.paused = false;
    const held = this.held;
    this.held = [];
    if (this.overflowed) {
      this.overflowed = false;
      this.dispatchEvent(new CustomEvent("refresh"));
    } else {
      for (const envelope of held) this.#deliver(envelope);
    }
    this.#announce();
  }

  get state() {
    if (this.paused) return "paused";
    if (this.connected) return "live";
    return this.polling ? "slow" : "offline";
  }

  #announce() {
    this.dispatchEvent(new CustomEvent("state", { detail: this.state }));
  }

  #connect() {
    const socket = new WebSocket(this.url);
    this.socket = socket;
    socket.addEventListener("open", () => this.#subscribe([...this.lastSeq.keys()]));
    socket.addEventListener("message", (message) => this.#receive(JSON.parse(message.data)));
    socket.addEventListener("close", (event) => this.#closed(event));
  }

  #closed(event) {
    this.connected = false;
    this.polling = false;
    this.#announce();
    if (event.code === UNAUTHENTICATED) {
      this.lastSeq.clear(); // the session ended: nothing more may be asked
      return;
    }
    const wait = this.delay * (0.5 + Math.random() / 2);
    this.delay = Math.min(MAX_DELAY_MS, this.delay * 2);
    setTimeout(() => this.#connect(), wait);
  }

  #subscribe(topics) {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const subscribe = topics.map((topic) => ({ topic, last_seq: this.lastSeq.get(topic) }));
    this.socket.send(JSON.stringify({ v: 1, subscribe }));
  }

  #receive(envelope) {
    switch (envelope.type) {
      case "stream.subscribed":
        this.connected = true;
        this.delay = FIRST_DELAY_MS;
        this.#announce();
        return;
      case "stream.unsubscribed":
        return;
      case "stream.reset": // the log stands before what we saw: the database was set back
        this.lastSeq.set(envelope.topic, envelope.seq);
        this.dispatchEvent(new CustomEvent("refresh"));
        return;
      case "stream.error": // a topic has no event before its first, and the database may be away
        if (envelope.topic) setTimeout(() => this.#subscribe([envelope.topic]), RETRY_TOPIC_MS);
        return;
      default:
        this.#take(envelope);
    }
  }

  #take(envelope) {
    const last = this.lastSeq.get(envelope.topic);
    if (last === undefined || envelope.seq <= last) return; // seen already
    if (envelope.seq > last + 1) {
      this.#fill(envelope.topic);
      return;
    }
    this.lastSeq.set(envelope.topic, envelope.seq);
    if (!this.paused) {
      this.#deliver(envelope);
    } else if (this.held.length < MAX_HELD) {
      this.held.push(envelope);
    } else {
      this.overflowed = true;
    }
  }

  // Read what comes after the last seq of a topic, page by page. One at a time for each topic.
  #fill(topic) {
    if (!this.filling.has(topic)) {
      this.filling.set(topic, this.#read(topic).finally(() => this.filling.delete(topic)));
    }
    return this.filling.get(topic);
  }

  async #read(topic) {
    for (;;) {
      const query = new URLSearchParams({ topic, after: this.lastSeq.get(topic) });
      const response = await fetch(`/api/v1/events?${query}`, { headers: { Accept: "application/json" } });
      if (!response.ok) return false;
      const page = await response.json();
      for (const envelope of page.results) this.#take(envelope);
      if (page.next_after >= page.seq || !page.results.length) return true;
    }
  }

  // While the socket is away the events are asked for, so that the page goes on, only slower.
  async #poll() {
    if (this.connected || document.hidden || !this.lastSeq.size) return;
    try {
      const answers = await Promise.all([...this.lastSeq.keys()].map((topic) => this.#fill(topic)));
      this.polling = !this.connected && answers.some(Boolean);
    } catch { // the server is away altogether
      this.polling = false;
    }
    this.#announce();
  }

  #deliver(envelope) {
    this.dispatchEvent(new CustomEvent("event", { detail: envelope }));
  }
}

export function liveUrl() {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  return `${scheme}//${location.host}/ws/v1/live`;
}

// Runs `work` at most once a `gap`, and again after its end when it was asked for meanwhile. A slow `work` stretches the
// gap, so that a page never asks faster than the server answers.
export function coalesced(work, gap = 1000) {
  let timer = null;
  let running = false;
  let again = false;
  async function go() {
    timer = null;
    running = true;
    const began = performance.now();
    try {
      await work();
    } finally {
      running = false;
      if (again) {
        again = false;
        timer = setTimeout(go, Math.max(gap, 4 * (performance.now() - began)));
      }
    }
  }
  return () => {
    if (running) again = true;
    else if (timer === null) timer = setTimeout(go, gap / 4);
  };
}
