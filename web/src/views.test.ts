import { describe, expect, it } from "vitest";
import { aroundConstant } from "./curves";
import { WITHOUT_NOTES } from "./events";
import { readGoodput } from "./goodput";
import { newestParts, shownLog, withoutCodes } from "./logs";
import { placeLabels } from "./marks";
import { startsOf } from "./price";
import { run } from "./samples";

describe("the labels of a curve's marks", () => {
  const room = { left: 0, right: 300, rows: 2 };

  it("do not overlap, and one without room is left out", () => {
    const wanted = [10, 20, 30].map((x) => ({ x, width: 100 }));
    expect(placeLabels(wanted, room)).toEqual(
      [{ left: 14, row: 0 }, { left: 24, row: 1 }, null]);
  });

  it("are on the left of their lines at the right edge, and never beyond an edge", () => {
    expect(placeLabels([{ x: 290, width: 100 }], room)).toEqual([{ left: 186, row: 0 }]);
    expect(placeLabels([{ x: 150, width: 400 }], room)).toEqual([null]);
  });
});

describe("the text of a log", () => {
  it("has no codes of terminals, and of overwritten lines the last state", () => {
    expect(withoutCodes("\u001b[31mred\u001b[0m \u001b]0;title\u0007end")).toBe("red end");
    expect(withoutCodes("10 %\r50 %\r90 %\nnext\r\n")).toBe("90 %\nnext\n");
    expect(withoutCodes("one\r\r\ntwo\r")).toBe("one\ntwo\r");
    // A title without an end hides its line only.
    expect(withoutCodes("a\u001b]0;title\nnext")).toBe("a\nnext");
  });

  it("has the colours of terminals where they are after overwritten lines", () => {
    const { text, colours } = shownLog(
      "\u001b[32m10 %\r\u001b[33m90 %\u001b[0m\r\n\u001b[1;31merr\u001b[38;5;31mor\u001b[94mend");
    expect(text).toBe("90 %\nerrorend");
    expect(colours.map(([start, end, colour]) => [text.slice(start, end), colour]))
      .toEqual([["90 %", 3], ["err", 1], ["end", 4]]);
  });

  it("takes no longer for one long line than for many", () => {
    const began = performance.now();
    expect(withoutCodes(`${"x".repeat(400_000)}\r`).length).toBe(400_001);
    expect(withoutCodes("\r".repeat(400_000)).length).toBe(400_000);
    expect(performance.now() - began).toBeLessThan(2_000);
  });

  it("keeps whole parts, the newest ones", () => {
    const parts = ["aaaa", "bbbb", "cccc"].map((text, index) => ({ offset: 4 * index, text }));
    expect(newestParts(parts, 8).map((one) => one.offset)).toEqual([4, 8]);
    expect(newestParts(parts, 1).map((one) => one.offset)).toEqual([8]);
  });
});

describe("a value that is odd", () => {
  it("makes an account of time unreadable, and a missing one counts as 0", () => {
    const { goodput } = run({});
    expect(readGoodput(goodput)?.ettr).toBe(0.833);
    expect(readGoodput({ total_s: 5, ettr: 1 })?.gpu_hours).toBe(0);
    for (const odd of [null, 7, {}, { ...goodput, gpu_hours: "many" }]) {
      expect(readGoodput(odd)).toBeNull();
    }
  });
});

it("the axis of a constant has it in the middle", () => {
  expect(aroundConstant(10)).toEqual([9, 11]);
  expect(aroundConstant(0)).toEqual([-1, 1]);
});

it("the events that are shown first are all but notes", () => {
  expect(WITHOUT_NOTES).toContain("launch_ended");
  expect(WITHOUT_NOTES).not.toContain("note");
  // The largest number of kinds in one request.
  expect(WITHOUT_NOTES.length).toBeLessThanOrEqual(100);
});

it("the starts of a run are the seconds until each attempt trained", () => {
  const at = (minute: number) => `2026-01-01T10:0${minute}:00Z`;
  const segment = (attempt: number, part: string, from: number, to: number) =>
    ({ attempt, part, began_at: at(from), ended_at: at(to) });
  expect(startsOf([segment(1, "queued", 0, 1), segment(1, "starting", 1, 2),
    segment(1, "training", 2, 3), segment(1, "loading", 3, 4), segment(2, "queued", 4, 5)]))
    .toEqual([120]);
});
