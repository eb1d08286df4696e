import { describe, expect, it } from "vitest";
import type { Point, Series } from "./api/types";
import {
  aroundConstant, countersOf, momentsOf, placeOfStep, STEP, stitch, TIME, TRAINING,
} from "./curves";
import { curveSearch, runsOf } from "./curveView";
import {
  extentOf, isFlat, logRange, logTicks, panned, placeWords, positive, rangeWords, smooth, zoomed,
} from "./scales";

type Values = Record<string, number | null>;

const point = (step: number, time_s: number, values: Values): Point => ({
  step, time: "", time_s, steps_per_s: 1,
  values: Object.fromEntries(Object.entries(values)
    .map(([name, last]) => [name, { last, low: last, high: last }])),
});

const launch = (attempt: number, ...points: Point[]): Series => ({ attempt, launch: 1, points });

// Two launches of one step a second; the second one waited 1,000 s and repeats step 30.
const TWO = [
  launch(1, point(10, 110, { loss: 3, tokens: 100 }), point(20, 120, { loss: 2, tokens: 200 }),
    point(30, 130, { loss: 9, tokens: 300 })),
  launch(2, point(30, 1130, { loss: 1, tokens: 310 }), point(40, 1140, { loss: 0, tokens: 410 })),
];

describe("the axis of curves", () => {
  it("counts steps, seconds since the submission, and seconds of training", () => {
    const x = (axis: string) => stitch(TWO, axis, 100)[0]?.x;
    expect(x(STEP)).toEqual([10, 20, 30, 40]);
    expect(x(TIME)).toEqual([10, 20, 1030, 1040]);
    // The wait between the launches and the repeated steps are no training of this curve.
    expect(x(TRAINING)).toEqual([10, 20, 30, 40]);
  });

  it("can be a metric that only grows, which is not a curve of its own then", () => {
    expect(countersOf(TWO)).toEqual(["tokens"]);
    const curves = stitch(TWO, "tokens");
    expect(curves.map(({ name }) => name)).toEqual(["loss", "steps per second"]);
    expect(curves[0]?.x).toEqual([100, 200, 310, 410]);
  });

  it("never goes back, whatever the clocks of two hosts say", () => {
    const back = [launch(1, point(1, 500, { loss: 3 }), point(2, 501, { loss: 3 })),
      launch(2, point(3, 400, { loss: 2 }), point(4, 502, { loss: 2 }))];
    expect(stitch(back, TIME, 499)[0]?.x).toEqual([1, 2, 3]);
    expect(momentsOf(back).map((one) => one.training_s)).toEqual([1, 2, 104, 206]);
  });

  it("has marks at the first point from their step on", () => {
    expect(placeOfStep(TWO, 25, TIME, 100)).toBe(1030);
    expect(placeOfStep(TWO, 25, STEP)).toBe(25);
    expect(placeOfStep(TWO, 99, TIME, 100)).toBeNull();
  });
});

describe("scales", () => {
  it("smooths from the first value on, and leaves gaps", () => {
    const rounded = smooth([4, 4, null, 4], 0.9).map((one) =>
      (one === null ? null : Number(one.toPrecision(9))));
    expect(rounded).toEqual([4, 4, null, 4]);
    const [, second] = smooth([0, 10], 0.5);
    expect(second).toBeCloseTo(20 / 3);
    expect(smooth([1, Number.NaN, 1], 0.5)).toEqual([1, null, 1]);
  });

  it("draws only positive values on a logarithmic axis", () =>
    expect(positive([1, 0, -1, null, 0.5])).toEqual([1, null, null, null, 0.5]));

  it.each([
    [2, 2, [1, 4]], [2, 2 + 1e-9, [1, 4]], [null, null, [0.1, 10]], [0, 5, [0.1, 10]],
  ] as const)("has room around %s to %s", (low, high, range) =>
    expect(logRange(low, high)).toEqual(range));

  it.each([
    [0.9, 120, [1, 2, 5, 10, 20, 50, 100]],
    [2.05, 2.62, [2.2, 2.4, 2.6]],
    [1e-8, 1e8, [1e-8, 1e-6, 1e-4, 1e-2, 1, 100, 1e4, 1e6, 1e8]],
    [5, 5, []], [0, 5, []],
  ])("has ticks from %s to %s", (low, high, ticks) => expect(logTicks(low, high)).toEqual(ticks));

  it("zooms around a point and stops at the whole", () => {
    expect(zoomed([0, 100], [0, 100], 0.5, 80)).toEqual([40, 90]);
    expect(zoomed([40, 90], [0, 100], 4, 60)).toBeNull();
    expect(panned([40, 90], [0, 100], 1)).toEqual([50, 100]);
    expect(panned([0, 100], [0, 100], 1)).toBeNull();
    expect(extentOf([{ x: [3, 9] }, { x: [] }, { x: [1, 4] }])).toEqual([1, 9]);
    expect(extentOf([])).toBeNull();
  });

  it("puts a constant in the middle", () => expect(aroundConstant(-5)).toEqual([-5.5, -4.5]));

  it("takes values that differ by rounding alone for a constant", () => {
    expect(isFlat(0.8333333, 0.8333334)).toBe(true);
    expect(isFlat(0, 0)).toBe(true);
    expect(isFlat(0.83, 0.84)).toBe(false);
    expect(isFlat(-1e-9, 1e-9)).toBe(false);
  });

  it("says positions in their unit", () => {
    expect(placeWords(STEP, 12_000)).toBe("12,000");
    expect(placeWords(TIME, 5400)).toBe("1 h 30 min");
    expect(placeWords("epoch", 1.5)).toBe("1.5");
    expect(rangeWords(STEP, [18.5, 1028.4])).toBe("19 – 1,028");
    expect(rangeWords("epoch", [0.25, 1])).toBe("0.25 – 1");
  });
});

describe("the address of curves", () => {
  it("keeps what is valid, and nothing else", () => {
    expect(curveSearch({ x: "tokens", log: true, smooth: 0.9, from: 10, to: 20, over: "vit" }))
      .toEqual({ x: "tokens", log: true, smooth: 0.9, from: 10, to: 20, over: "vit" });
    const none = { x: undefined, log: undefined, smooth: undefined, from: undefined,
      to: undefined, over: undefined };
    expect(curveSearch({ x: "step", log: "yes", smooth: 1, from: 20, to: 10, over: {} }))
      .toEqual(none);
    expect(curveSearch({ smooth: -1, from: "a", to: Number.NaN })).toEqual(none);
  });

  it("names at most eight different runs", () => {
    expect(runsOf("a, b,,a")).toEqual(["a", "b"]);
    expect(runsOf(7)).toEqual(["7"]);
    expect(runsOf("1,2,3,4,5,6,7,8,9")).toHaveLength(8);
    expect(runsOf(undefined)).toEqual([]);
  });
});
