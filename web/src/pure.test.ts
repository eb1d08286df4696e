import { describe, expect, it } from "vitest";
import type { Attempt, Checkpoint, Point, Series } from "./api/types";
import { stitch } from "./curves";
import { bytes, checkpointWords, count, percent, relative, runOf, span, when } from "./format";
import { timeLeft } from "./progress";
import { reachedStages, stageOf } from "./stages";
import { segmentsOf, ticks } from "./timeline";

describe("format", () => {
  it.each([
    [0, "0 s"], [0.0004, "1 ms"], [1.26, "1.3 s"], [59.6, "1 min"], [3_600, "1 h"],
    [93_784, "1 d 2 h"], [null, "–"], [Number.NaN, "–"], [-90, "−1 min 30 s"],
  ])("says %s seconds as %s", (seconds, words) => expect(span(seconds)).toBe(words));

  it.each([
    [0, "0 B"], [1023, "1023 B"], [1536, "1.50 KiB"], [5e12, "4.55 TiB"], [null, "–"],
  ])("says %s bytes as %s", (size, words) => expect(bytes(size)).toBe(words));

  it("groups digits, tells time, reads ids", () => {
    expect(count(1_234_567)).toBe("1\u202f234\u202f567");
    expect(percent(1)).toBe("100 %");
    expect(relative(0, 7_400_000)).toBe("2 h ago");
    expect(relative(90_000, 0)).toBe("in 1 min");
    expect(when("no time")).toBeNull();
    expect(runOf("gpt:step-00000100.a0001.i01")).toBe("gpt");
    expect(checkpointWords("gpt:step-00000100.a0002.i03")).toBe("step 100 · attempt 2.3");
  });
});

const point = (step: number, loss: number): Point => ({
  step, time: "", time_s: step, steps_per_s: 1,
  values: { loss: { last: loss, low: loss, high: loss } },
});

const series = (attempt: number, ...steps: number[]): Series => ({
  attempt, incarnation: 1, points: steps.map((step) => point(step, attempt)),
});

describe("stitch", () => {
  it("lets the later attempt's word stand where steps were trained again", () => {
    const [loss] = stitch([series(2, 30, 40, 50), series(1, 10, 20, 30, 40), series(3)]);
    expect(loss).toEqual({ name: "loss", x: [10, 20, 30, 40, 50], y: [1, 1, 2, 2, 2] });
  });

  it("puts the loss first and the pace last", () => {
    const told = series(1, 1, 2);
    for (const one of told.points) one.values.accuracy = { last: 1, low: 1, high: 1 };
    expect(stitch([told]).map((one) => one.name)).toEqual(
      ["loss", "accuracy", "steps per second"]);
  });
});

const at = (seconds: number) => new Date(seconds * 1000).toISOString();

const attempt = (fields: Partial<Attempt>): Attempt => ({
  number: 1, state: "running", cause: null, evidence: [], reason: null, executor: null,
  job_id: null, nodes: [], world_size: 2, resumed_from: null, resumed_step: null, first_step: null,
  last_step: null, committed_step: null, steps: null, incarnations: [], submitted_at: null,
  started_at: null, stop_requested_at: null, stop_committed_at: null, ended_at: null,
  signal_to_commit_s: null, failed_rank: null, traceback: null, ...fields,
});

const launch = (from: number, to: number | null) => ({
  number: 1, world_size: 2, resumed_from: null, first_step: 1, last_step: null,
  started_at: at(from), ended_at: to === null ? null : at(to), ending: null, exit_code: null,
});

const told = (one: Attempt, now: number) =>
  segmentsOf(one, now * 1000).map(({ part, from, to }) => [part, from / 1000, to / 1000]);

describe("segmentsOf", () => {
  it("shows an attempt that waits as queued until now", () => {
    expect(told(attempt({ submitted_at: at(10) }), 40)).toEqual([["queued", 10, 40]]);
  });

  it("shows start, training and the last flush of one that was preempted", () => {
    const one = attempt({
      submitted_at: at(0), started_at: at(10), incarnations: [launch(20, 110)],
      stop_requested_at: at(100), ended_at: at(110), first_step: 1, last_step: 80,
      committed_step: 80,
    });
    expect(told(one, 500)).toEqual([
      ["queued", 0, 10], ["starting", 10, 20], ["training", 20, 100], ["flushing", 100, 110],
    ]);
  });

  it("shows the share of training that a lost node took with it", () => {
    const one = attempt({
      submitted_at: at(0), started_at: at(0), incarnations: [launch(0, 100)], ended_at: at(100),
      first_step: 1, last_step: 100, committed_step: 75,
    });
    expect(told(one, 500)).toEqual([["training", 0, 75], ["lost", 75, 100]]);
  });

  it("has no time without a time", () => {
    expect(told(attempt({}), 40)).toEqual([]);
  });
});

describe("small decisions", () => {
  it("chooses few and round ticks", () => {
    expect(ticks(0, 3_600_000, 6)).toEqual([0, 900_000, 1_800_000, 2_700_000, 3_600_000]);
    expect(ticks(0, 1e15, 5).length).toBeLessThanOrEqual(6);
  });

  it("says how long a run still needs only where that can be known", () => {
    const run = { state: "running", step: 100, steps_total: 400, goodput: { training_s: 50 } };
    expect(timeLeft(run)).toBe(150);
    expect(timeLeft({ ...run, state: "waiting" })).toBeNull();
    expect(timeLeft({ ...run, steps_total: null })).toBeNull();
    expect(timeLeft({ ...run, step: 400 })).toBeNull();
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

  it("are told in their order, with whoever read it back", () => {
    const one = { state: "committed", staged_at: "a", committed_at: "b", verified_ok: true,
      verified_at: "c", verified_by: "resume", mirrored_at: null } as Checkpoint;
    expect(reachedStages(one).map(({ word, at, note }) => [word, at, note])).toEqual([
      ["staged", "a", null], ["durable", "b", null], ["verified", "c", "by a resume"],
      ["mirrored", null, null]]);
  });
});
