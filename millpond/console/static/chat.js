// A chat over /v1/chat/completions, streamed. Model text is only ever set as text, never as HTML.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "priority"];

export class Chat {
  constructor(byId, { authorization, events, askForKey }) {
    this.byId = byId;
    this.authorization = authorization;
    this.events = events;
    this.askForKey = askForKey;
    this.messages = [];
    this.abort = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.byId("chat-log").replaceChildren();
  }

  /** The fields that were filled in; the server's defaults are for the rest. */
  parameters() {
    const fields = new FormData(this.byId("chat-form"));
    const chosen = {};
    for (const name of NUMBERS) {
      const text = fields.get(name).trim();
      if (text !== "") chosen[name] = Number(text);
    }
    if (fields.get("stop")) chosen.stop = fields.get("stop");
    return { chosen, system: fields.get("system").trim() };
  }

  bubble(role, text) {
    const made = document.createElement("div");
    made.className = `message ${role}`;
    made.textContent = text;
    this.byId("chat-log").append(made);
    this.scroll();
    return made;
  }

  scroll() {
    const log = this.byId("chat-log");
    log.scrollTop = log.scrollHeight;
  }

  async send() {
    const input = this.byId("chat-input");
    const text = input.value.trim();
    if (!text || this.abort) return;
    input.value = "";
    this.messages.push({ role: "user", content: text });
    this.bubble("user", text);
    const answer = this.bubble("assistant", "");
    answer.classList.add("open");
    this.setBusy(true);
    const abort = (this.abort = new AbortController());
    const began = performance.now();
    let usage = null;
    let why = "";
    try {
      usage = await this.stream(answer, abort.signal);
    } catch (error) {
      why = abort.signal.aborted ? "stopped" : error.message;
    }
    if (this.abort === abort) this.abort = null;
    this.setBusy(false);
    answer.classList.remove("open");
    if (answer.textContent) this.messages.push({ role: "assistant", content: answer.textContent });
    else if (why) this.messages.pop();
    if (answer.isConnected) this.note(answer, usage, why, (performance.now() - began) / 1000);
  }

  async stream(answer, signal) {
    const { chosen, system } = this.parameters();
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const body = { ...chosen, messages, stream: true, stream_options: { include_usage: true } };
    const headers = { "content-type": "application/json", ...this.authorization() };
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (response.status === 401) this.askForKey();
    if (!response.ok) throw new Error((await response.json()).error.message);
    let usage = null;
    for await (const chunk of this.events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk;
      const delta = chunk.choices?.[0]?.delta;
      if (delta?.content || delta?.reasoning_content) {
        answer.append(delta.reasoning_content ?? "", delta.content ?? "");
        this.scroll();
      }
    }
    return usage;
  }

  note(answer, usage, why, seconds) {
    const parts = [];
    if (usage) {
      const made = usage.usage.completion_tokens;
      parts.push(`${made} tokens`, `${(made / seconds).toFixed(1)} tok/s`);
      const parked = usage.millpond?.parked_ms ?? 0;
      if (parked) parts.push(`parked ${(parked / 1000).toFixed(1)} s`);
      const cached = usage.usage.prompt_tokens_details?.cached_tokens;
      if (cached) parts.push(`${cached} of ${usage.usage.prompt_tokens} prompt tokens cached`);
    }
    if (why) parts.push(why);
    const made = document.createElement("div");
    made.className = why && why !== "stopped" ? "note bad" : "note";
    made.textContent = parts.join(" · ");
    answer.after(made);
    this.scroll();
  }

  setBusy(busy) {
    this.byId("chat-send").hidden = busy;
    this.byId("chat-stop").hidden = !busy;
  }
}
