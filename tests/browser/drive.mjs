// Drives the console in a headless Chromium. Arguments: JSON with url, key, out, chromium, requests, tokens, picture.
// Prints a line a check; exits 1 at the first that fails.
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

const asked = JSON.parse(process.argv[2]);
const FLAGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--hide-scrollbars",
];
const TOPICS = ["a mill by a pond", "a lighthouse in winter", "the first train to the sea", "a clockmaker's last clock"];
const SYSTEM = "You tell long stories in plain words. You never stop early, and you never list things.";
const PATIENCE = 120_000;
const troubles = [];

function check(what, holds) {
  console.log(`${holds ? "ok  " : "FAIL"} ${what}`);
  if (!holds) throw new Error(what);
}

async function load(tokens, topic, seed) {
  const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: `Tell me about ${topic}.` }];
  const body = { messages, max_tokens: tokens, ignore_eos: true, seed };
  const headers = { "content-type": "application/json", authorization: `Bearer ${asked.key}` };
  const response = await fetch(`${asked.url}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw new Error(JSON.stringify(answer));
  return answer.usage.completion_tokens;
}

const loads = (tokens) => TOPICS.slice(0, asked.requests).map((topic, index) => load(tokens, topic, index + 1));

/** Trouble is what a person would see in the developer tools, but for the 401 that makes the page ask for its key. */
function listen(page) {
  page.on("pageerror", (error) => troubles.push(`page error: ${error.message}`));
  page.on("requestfailed", (request) => {
    const expected = /events|completions/.test(request.url()) && /ABORTED/.test(request.failure()?.errorText ?? "");
    if (!expected) troubles.push(`request failed: ${request.url()} ${request.failure()?.errorText}`);
  });
  page.on("console", (message) => {
    if (message.type() === "error" && !message.text().includes("401")) troubles.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(asked.url) && !request.url().startsWith("data:")) troubles.push(`went elsewhere: ${request.url()}`);
  });
}

async function giveKey(page) {
  await page.waitForSelector("#key-dialog[open]");
  check("without a key the page asks for one, and shows no data", (await page.textContent("#f-running")) === "–");
  await page.fill("#key-input", asked.key);
  await page.keyboard.press("Enter");
  await page.waitForSelector('#state[data-state="ready"]', { timeout: PATIENCE });
  check("with the key the engine is ready", true);
}

const shown = (page) => page.$$eval("#requests .row", (rows) => rows.map((row) => [row.dataset.state, row.querySelector(".count").textContent]));

async function watchLoad(page) {
  const work = loads(asked.tokens);
  await page.waitForSelector('#requests .row[data-state="running"]', { timeout: PATIENCE });
  const before = JSON.stringify(await shown(page));
  await page.waitForFunction((old) => {
    const rows = [...document.querySelectorAll("#requests .row")];
    return JSON.stringify(rows.map((row) => [row.dataset.state, row.querySelector(".count").textContent])) !== old;
  }, before, { timeout: PATIENCE });
  check("rows change under load without a reload", true);
  await page.waitForSelector('#requests .row[data-state="parked"]', { timeout: PATIENCE });
  await page.waitForFunction(() => document.querySelector('#requests .row[data-state="parked"] .chip').textContent.includes("no cells"), null, { timeout: PATIENCE });
  check("a parked request says why", true);
  check("preemptions are counted", Number(await page.textContent("#f-preemptions")) > 0);
  return work;
}

async function pictures(page) {
  await page.screenshot({ path: join(asked.out, "light.png") });
  await page.click('#requests .row[data-state="parked"], #requests .row');
  await page.waitForSelector("#timeline[open]");
  check("a click opens the timeline", (await page.textContent("#timeline-events")).includes("accepted"));
  await page.screenshot({ path: join(asked.out, "timeline.png") });
  await page.keyboard.press("Escape");
  check("Esc closes it", (await page.$("#timeline[open]")) === null);
  await page.emulateMedia({ colorScheme: "dark" });
  check("dark follows the system", await isDark(page));
  await page.waitForTimeout(600);
  await page.screenshot({ path: join(asked.out, "dark.png") });
  await page.emulateMedia({ colorScheme: "light" });
  await page.click("#theme");
  check("the button goes the other way", await isDark(page));
  await page.click("#theme");
  check("and back", !(await isDark(page)));
}

const isDark = (page) => page.evaluate(() => getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1");

async function phone(page) {
  await page.setViewportSize({ width: 390, height: 844 });
  await page.waitForTimeout(700);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  check("nothing sticks out on a phone", wide <= 0);
  await page.screenshot({ path: join(asked.out, "phone.png"), fullPage: true });
  await page.setViewportSize({ width: 1440, height: 900 });
}

async function keyboard(page) {
  await page.evaluate(() => document.activeElement?.blur());
  await page.focus("#requests .row");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#timeline[open]");
  await page.keyboard.press("Escape");
  check("Enter on a row opens its timeline, Esc closes it", (await page.$("#timeline[open]")) === null);
  await page.keyboard.press("/");
  check("/ goes to the chat", (await page.evaluate(() => document.activeElement.id)) === "chat-input");
}

async function chat(page) {
  await page.keyboard.type("Say hello to the pond.");
  await page.click("summary");
  await page.fill('[name="max_tokens"]', "24");
  await page.fill('[name="temperature"]', "0");
  await page.focus("#chat-input");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".note", { timeout: PATIENCE });
  check("the chat answers", (await page.textContent(".message.assistant")).length > 5);
  check("with its figures", /\d+ tokens · [\d.]+ tok\/s/.test(await page.textContent(".note")));
  await page.fill('[name="max_tokens"]', "400");
  await page.fill("#chat-input", "<img src=x onerror=alert(1)> Tell me a very long story.");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => [...document.querySelectorAll(".message.assistant")].at(-1).textContent.length > 10, null, { timeout: PATIENCE });
  await page.click("#chat-stop");
  await page.waitForFunction(() => document.querySelectorAll(".note").length === 2, null, { timeout: PATIENCE });
  check("Stop ends one's own answer", (await page.$$eval(".note", (notes) => notes.at(-1).textContent)).includes("stopped"));
  check("what is said is never markup", (await page.$$(".log img")).length === 0);
  await page.waitForFunction(() => document.getElementById("f-running").textContent === "0", null, { timeout: PATIENCE });
  check("and the server ends it too", true);
  await page.screenshot({ path: join(asked.out, "chat.png") });
}

async function wholeTour(page) {
  await page.goto(`${asked.url}/console`);
  await giveKey(page);
  const work = await watchLoad(page);
  await pictures(page);
  await phone(page);
  check(`every request got its ${asked.tokens} tokens`, (await Promise.all(work)).every((made) => made === asked.tokens));
  await page.waitForFunction(() => document.getElementById("f-running").textContent === "0", null, { timeout: PATIENCE });
  check("none was lost", (await page.textContent("#f-losses")) === "0");
  await keyboard(page);
  await chat(page);
}

/** The picture of the docs: the state in which most are parked, late enough for the charts to have something. */
async function picture(page) {
  await page.goto(`${asked.url}/console`);
  await giveKey(page);
  const work = loads(asked.tokens);
  await page.waitForFunction(() => document.querySelectorAll('#requests .row[data-state="parked"]').length >= 2, null, { timeout: PATIENCE });
  await page.waitForTimeout(2500);
  await page.screenshot({ path: asked.picture });
  check(`every request got its ${asked.tokens} tokens`, (await Promise.all(work)).every((made) => made === asked.tokens));
}

const profile = mkdtempSync(join(tmpdir(), "console-"));
const context = await chromium.launchPersistentContext(profile, {
  executablePath: asked.chromium,
  args: FLAGS,
  viewport: { width: 1440, height: 900 },
  colorScheme: "light",
});
try {
  const page = context.pages()[0] ?? (await context.newPage());
  listen(page);
  await (asked.picture ? picture(page) : wholeTour(page));
  check(`nothing in the developer tools${troubles.map((line) => `\n     ${line}`).join("")}`, troubles.length === 0);
} catch (error) {
  console.log(`FAIL ${error.message}${troubles.map((line) => `\n     ${line}`).join("")}`);
  process.exitCode = 1;
} finally {
  await context.close();
  rmSync(profile, { recursive: true, force: true });
}
