import { describe, expect, it } from "vitest";
import type { Checkpoint, Point, Run, Series } from "./api/types";
import { stitch } from "./curves";
import { KINDS, factOf, factsOf } from "./events";
import {
  bytes, checkpointWords, count, percent, relative, runOf, span, when,
} from "./format";
import { committedStep, stepOf, timeLeft } from "./progress";
import { attempt } from "./samples";
import { cardTowards } from "./keyboard";
import { reachedStages, stageOf } from "./durability";
import { STEP_INCREMENTS } from "./scales";
import { segmentsOf, ticks } from "./timeline";

describe("format", () => {
  it.each([
    [0, "0 s"], [0.0004, "1 ms"], [1.26, "1.3 s"], [59.6, "1 min"], [3_600, "1 h"],
    [93_784, "1 d 2 h"], [null, "–"], [Number.NaN, "–"], [-90, "−1 min 30 s"],
  ])("says %s seconds as %s", (seconds, words) => expect(span(seconds)).toBe(words));

  it.each([
    [0, "0 B"], [1023, "1,023 B"], [1536, "1.50 KiB"], [5e12, "4.55 TiB"], [null, "–"],
  ])("says %s bytes as %s", (size, words) => expect(bytes(size)).toBe(words));

  it("groups digits, formats times and parses ids", () => {
    expect(count(1_234_567)).toBe("1,234,567");
    expect(percent(1)).toBe("100 %");
    expect(relative(0, 7_400_000)).toBe("2 h ago");
    expect(relative(90_000, 0)).toBe("in 1 min");
    expect(when("no time")).toBeNull();
    expect(runOf("gpt:step-00000100.a0001.l01")).toBe("gpt");
    expect(checkpointWords("gpt:step-00000100.a0002.l03")).toBe("step 100 · attempt 2.3");
  });
});

const point = (step: number, loss: number): Point => ({
  step, time: "", time_s: step, steps_per_s: 1,
  values: { loss: { last: loss, low: loss, high: loss } },
});

const series = (attempt: number, ...steps: number[]): Series => ({
  attempt, launch: 1, points: steps.map((step) => point(step, attempt)),
});

describe("stitch", () => {
  it("uses the later attempt's values for repeated steps", () => {
    const [loss] = stitch([series(2, 30, 40, 50), series(1, 10, 20, 30, 40), series(3)]);
    expect(loss).toEqual({ name: "loss", x: [10, 20, 30, 40, 50], y: [1, 1, 2, 2, 2] });
  });

  it("puts the loss first and the rate last", () => {
    const logged = series(1, 1, 2);
    for (const one of logged.points) one.values.accuracy = { last: 1, low: 1, high: 1 };
    expect(stitch([logged]).map((one) => one.name)).toEqual(
      ["loss", "accuracy", "steps per second"]);
  });
});

it("puts ticks at whole steps only", () => {
  expect(STEP_INCREMENTS.every(Number.isInteger)).toBe(true);
  expect(STEP_INCREMENTS).toEqual(STEP_INCREMENTS.toSorted((a, b) => a - b));
});

const at = (seconds: number) => new Date(seconds * 1000).toISOString();

const segment = (part: string, from: number, to: number, attempt = 1) =>
  ({ attempt, part, began_at: at(from), ended_at: at(to) });

describe("segmentsOf", () => {
  const segments = [
    segment("queued", 0, 10), segment("training", 10, 40), segment("lost", 5, 6, 2)];

  it("takes the segments of one attempt, and extends the last one until now", () => {
    expect(segmentsOf(attempt({}), segments, 50_000)).toEqual([
      { attempt: 1, part: "queued", from: 0, to: 10_000 },
      { attempt: 1, part: "training", from: 10_000, to: 50_000 }]);
    const ended = attempt({ ended_at: at(40) });
    expect(segmentsOf(ended, segments, 50_000).at(-1)?.to).toBe(40_000);
  });
});

describe("ticks and progress", () => {
  it("chooses few round ticks", () => {
    expect(ticks(0, 3_600_000, 6)).toEqual([0, 900_000, 1_800_000, 2_700_000, 3_600_000]);
    expect(ticks(0, 1e15, 5).length).toBeLessThanOrEqual(6);
  });

  it("returns the time left only if it is known", () => {
    const run = { state: "running", step: 100, live_step: 150, steps_total: 400, step_s: 0.5 };
    // It uses the newest step and not the last commit, so it never increases during training.
    expect(timeLeft(run)).toBe(125);
    expect(timeLeft({ ...run, state: "waiting" })).toBeNull();
    expect(timeLeft({ ...run, steps_total: null })).toBeNull();
    expect(timeLeft({ ...run, live_step: 400 })).toBeNull();
    expect(timeLeft({ ...run, step_s: null })).toBeNull();
  });

  it("has no step before the first one, and finds the newest commit across attempts", () => {
    expect(stepOf({ step: null, live_step: -1 })).toBeNull();
    expect(stepOf({ step: 0, live_step: 7 })).toBe(7);
    const attempts = [attempt({ committed_step: 3190 }), attempt({ number: 2 })];
    expect(committedStep({ state: "running", step: 3190, attempts } as Run)).toBe(3190);
    expect(committedStep({ state: "completed", step: 3200, attempts } as Run)).toBe(3190);
  });
});

describe("stages", () => {
  it.each([
    ["staged", undefined, "staged"], ["committed", null, "durable"],
    ["committed", true, "verified"], ["committed", false, "damaged"],
    ["deleted", true, "deleted"], ["damaged", true, "damaged"],
  ] as const)("%s with the verdict %s is %s", (state, verdict, stage) => {
    expect(stageOf(state, verdict)).toBe(stage);
  });

  it("are listed in order, with the verifier's name", () => {
    const one = { state: "committed", staged_at: "a", committed_at: "b", verified_ok: true,
      verified_at: "c", verified_by: "resume", mirrored_at: null } as Checkpoint;
    const own = [
      ["staged", "a", null], ["durable", "b", null], ["verified", "c", "by a resume"]];
    const stages = (hasMirror: boolean) =>
      reachedStages(one, hasMirror).map(({ word, at, note }) => [word, at, note]);
    expect(stages(true)).toEqual([...own, ["mirrored", null, null]]);
    // Without a mirror, there is no such stage.
    expect(stages(false)).toEqual(own);
  });
});

describe("the arrow keys in a graph", () => {
  const places = new Map([["a", { x: 0, y: 0 }], ["b", { x: 200, y: 10 }], ["c", { x: 200, y: 90 }],
    ["d", { x: 0, y: 100 }]]);

  it.each([
    ["a", "ArrowRight", "b"], ["a", "ArrowDown", "d"], ["b", "ArrowDown", "c"],
    ["c", "ArrowLeft", "d"], ["d", "ArrowUp", "a"], ["a", "ArrowLeft", undefined],
    ["a", "Enter", undefined], ["unknown", "ArrowUp", undefined],
  ])("lead from %s by %s to %s", (from, key, to) =>
    expect(cardTowards(places, from, key)).toBe(to));
});

describe("events", () => {
  it("format times, and leave numeric identifiers unchanged", () => {
    expect(factOf("deadline", 1_795_000_000)).toMatch(/^Nov 1\d, 2026/);
    expect(factOf("pid", 19_080)).toBe("19080");
    expect(factOf("agent_pid", 4_000)).toBe("4000");
    expect(factOf("waited_s", 90)).toBe("1 min 30 s");
    expect(factOf("step", 19_080)).toBe(count(19_080));
    expect(factsOf({ attempt: 1, pid: 7, reason: "", dumps: [] })).toBe("pid 7");
    expect(KINDS).toContain("hang_suspected");
  });
});
