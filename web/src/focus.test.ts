// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, it } from "vitest";
import { keepFocus } from "./focus";

let stop = () => {};

beforeEach(() => {
  document.body.innerHTML = `
    <main tabindex="-1">
      <ul><li><a href="/a">a</a></li><li><button id="gone">gone</button></li></ul>
      <p><button id="busy">busy</button></p>
    </main>
    <div id="portal">
      <div role="dialog" tabindex="-1"><button id="close">close</button></div>
    </div>`;
  // jsdom lays nothing out.
  HTMLElement.prototype.getClientRects = () => [{}] as unknown as DOMRectList;
  stop = keepFocus();
});
afterEach(() => stop());

const one = (query: string) => document.querySelector<HTMLElement>(query);
const changed = () => new Promise((done) => setTimeout(done, 0));

it("moves the focus to the control before one that was removed", async () => {
  one("#gone")?.focus();
  one("#gone")?.parentElement?.remove();
  await changed();
  expect(document.activeElement).toBe(one("a"));
});

it("moves it to what is around if nothing is before", async () => {
  one("a")?.focus();
  one("ul")?.remove();
  await changed();
  expect(document.activeElement).toBe(one("main"));
});

it("returns it to a control that was disabled for a while", async () => {
  const busy = one("#busy") as HTMLButtonElement;
  busy.focus();
  // The library does not take the focus from what is disabled, as browsers do.
  busy.blur();
  busy.disabled = true;
  await changed();
  expect(document.activeElement).toBe(document.body);
  busy.disabled = false;
  await changed();
  expect(document.activeElement).toBe(busy);
});

it("leaves the focus away after a control gave it up", async () => {
  one("#busy")?.focus();
  one("#busy")?.blur();
  one("ul")?.remove();
  await changed();
  expect(document.activeElement).toBe(document.body);
});

it("goes back to what opened a dialog, or to what is left there", async () => {
  one("#gone")?.focus();
  one("#close")?.focus();
  one("#gone")?.parentElement?.remove();
  one("#portal")?.remove();
  await changed();
  expect(document.activeElement).toBe(one("a"));
});

it("leaves the focus away after a click beside all controls", async () => {
  one("#busy")?.focus();
  document.body.dispatchEvent(new MouseEvent("pointerdown", { bubbles: true }));
  one("#busy")?.remove();
  await changed();
  expect(document.activeElement).toBe(document.body);
});
