// @vitest-environment happy-dom
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { openStream, type News } from "./api/stream";

class Source {
  static readonly CLOSED = 2;
  static readonly made: Source[] = [];
  readyState = 0;
  onopen = () => {};
  onerror = () => {};

  constructor(readonly url: string) {
    Source.made.push(this);
  }

  addEventListener() {}

  close() {
    this.readyState = Source.CLOSED;
  }
}

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("EventSource", Source);
  Source.made.length = 0;
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe("the event stream", () => {
  it("begins after the page's event, and later ones may have missed some", () => {
    const told: News[] = [];
    openStream("/events", "ab-7", (news) => told.push(news));
    const [first] = Source.made;
    expect(first?.url).toBe("/events?after=ab-7");
    first?.onopen();
    // The browser itself connects again.
    first?.onerror();
    first?.onopen();
    expect(told.map(({ name, after }) => [name, after])).toEqual(
      [["open", "ab-7"], ["failed", undefined], ["open", undefined]]);
  });

  it("connects again after a refusal, and once for several tabs that ask", () => {
    const stream = openStream("/events", "ab-7", () => {});
    Source.made[0]?.close();
    Source.made[0]?.onerror();
    vi.advanceTimersByTime(6_000);
    expect(Source.made.map(({ url }) => url)).toEqual(["/events?after=ab-7", "/events"]);
    vi.advanceTimersByTime(12_000);
    stream.reopen();
    stream.reopen();
    expect(Source.made).toHaveLength(3);
    expect(Source.made[1]?.readyState).toBe(Source.CLOSED);
  });
});
