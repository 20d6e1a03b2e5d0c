// The console's page: reads snapshots from /console/events and hands them to the panels. Changes nothing on the server.
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Pool } from "./pool.js";
import { Requests } from "./requests.js";

const KEY = "millpond-key";
const THEME = "millpond-theme";
const FIRST_RETRY = 1000;
const LAST_RETRY = 10000;
const byId = (id) => document.getElementById(id);

export function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

// -- events --------------------------------------------------------------------------------------------------------

/** Yields the JSON of each `data:` line of an SSE answer. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

class Feed {
  constructor(onSnapshot) {
    this.onSnapshot = onSnapshot;
    this.abort = null;
    this.timer = null;
    this.pause = FIRST_RETRY;
  }

  async start() {
    this.stop();
    const abort = (this.abort = new AbortController());
    try {
      const response = await fetch("console/events", { headers: authorization(), signal: abort.signal });
      if (response.status === 401) return askForKey();
      if (!response.ok) throw new Error(`the server answered ${response.status}`);
      notice("");
      for await (const snapshot of events(response)) {
        this.pause = FIRST_RETRY;
        this.onSnapshot(snapshot);
      }
      throw new Error("the server closed the connection");
    } catch (error) {
      if (abort.signal.aborted) return;
      showState("offline", error.message);
      notice(`Not connected: ${error.message}. Trying again.`);
      this.timer = setTimeout(() => this.start(), this.pause);
      this.pause = Math.min(2 * this.pause, LAST_RETRY);
    }
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
  }
}

// -- page ----------------------------------------------------------------------------------------------------------

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function showState(state, detail) {
  const pill = byId("state");
  pill.textContent = state;
  pill.dataset.state = state;
  pill.title = detail || "";
}

function askForKey() {
  showState("locked", "an API key is needed");
  byId("key-button").hidden = false;
  byId("key-input").value = "";
  byId("key-dialog").showModal();
}

const count = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return [value >= 100 || place === 0 ? value.toFixed(0) : value.toFixed(1), units[place]];
}

/** What changed between two snapshots, as rates. */
class Rates {
  constructor() {
    this.last = null;
    this.recent = [];
  }

  of(snapshot) {
    const last = this.last;
    this.last = snapshot;
    const seconds = last ? snapshot.now - last.now : 0;
    if (!last || seconds <= 0 || snapshot.tokens < last.tokens) return null;
    this.recent = [...this.recent.slice(-3), [snapshot.tokens - last.tokens, seconds]];
    const tokens = this.recent.reduce((sum, [n]) => sum + n, 0);
    const time = this.recent.reduce((sum, [, t]) => sum + t, 0);
    return { tokens: tokens / time, ...gaps(last, snapshot, seconds), step: stepTimes(last.totals, snapshot.totals) };
  }
}

/** Milliseconds between tokens of streams that ran all the time between the two. */
function gaps(last, snapshot, seconds) {
  const before = new Map(last.requests.map((request) => [request.sequence, request]));
  const found = [];
  for (const request of snapshot.requests) {
    const old = before.get(request.sequence);
    const made = old ? request.generated - old.generated : 0;
    if (old?.state === "running" && request.state === "running" && old.generated && made > 0) {
      found.push((1000 * seconds) / made);
    }
  }
  found.sort((a, b) => a - b);
  return found.length ? { gap: found[found.length >> 1], slowest: found[found.length - 1] } : { gap: null, slowest: null };
}

function stepTimes(last, totals) {
  if (!totals || !last || totals.steps <= last.steps) return null;
  const steps = totals.steps - last.steps;
  const each = (name) => (totals[name] - last[name]) / steps;
  return { decode: each("decode_ms"), sample: each("sample_ms"), emit: each("emit_ms"), move: each("move_ms"), schedule: each("schedule_ms") };
}

const rates = new Rates();
const charts = new Charts(byId);
const pool = new Pool(byId);
const requests = new Requests(byId);
const chat = new Chat(byId, { authorization, events, askForKey });

function figure(id, value) {
  const text = value === null || value === undefined ? "–" : value;
  if (byId(id).textContent !== String(text)) byId(id).textContent = text;
}

function show(snapshot) {
  const { engine, counts, totals } = snapshot;
  showState(engine.state, engine.detail);
  byId("model").textContent = engine.info ? engine.info.model : "";
  byId("model").title = engine.info ? engine.info.description : "";
  byId("scope").hidden = snapshot.sees_all;
  const rate = rates.of(snapshot);
  figure("f-rate", rate && (rate.tokens < 100 ? rate.tokens.toFixed(1) : rate.tokens.toFixed(0)));
  figure("f-gap", rate && rate.gap !== null ? rate.gap.toFixed(rate.gap < 10 ? 1 : 0) : null);
  figure("f-running", counts.running);
  figure("f-parked", counts.parked);
  figure("f-waiting", counts.waiting);
  byId("f-parked").parentElement.classList.toggle("some", counts.parked > 0);
  figure("f-losses", snapshot.losses);
  byId("f-losses").parentElement.classList.toggle("bad", snapshot.losses > 0);
  if (totals) {
    const parked = totals.parked_to_grow + totals.parked_to_prefill + totals.parked_exhausted + totals.parked_for_turn;
    figure("f-preemptions", count.format(parked));
    figure("f-resumes", count.format(totals.resumes));
    figure("f-evicted", count.format(totals.evicted_tokens));
    const [saved, unit] = bytes(totals.saved_bytes);
    figure("f-saved", saved);
    figure("f-saved-unit", unit);
  }
  charts.add(snapshot, rate);
  requests.show(snapshot);
  pool.show(snapshot);
}

// -- theme and keys ------------------------------------------------------------------------------------------------

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  charts.restyle();
  pool.draw();
}

byId("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  const theme = dark ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(null));
setTheme(localStorage.getItem(THEME));

const feed = new Feed(show);
byId("key-button").addEventListener("click", askForKey);
byId("key-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, byId("key-input").value.trim());
  feed.start();
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    byId("chat-input").focus();
  } else if (event.key === "Escape" && typing && !event.target.closest("dialog")) {
    event.target.blur();
  }
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
document.addEventListener("visibilitychange", () => (document.hidden ? feed.stop() : feed.start()));
feed.start();
