// @vitest-environment happy-dom
import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { describe, expect, it, vi } from "vitest";
import type { GpuSeries, HeatMap, RankMeans } from "./api/schema";
import { cellsOf, hostOf, levelAt, moved, paint, paletteOf, scaleOf, valueOf } from "./heat";
import { count } from "./format";
import { trackOptions } from "./parts/TrackChart";
import { attempt, run } from "./samples";
import { openPage, rowsOf } from "./testbed";

// happy-dom has no canvas.
vi.mock("uplot", () => ({ default: class {
  redraw() {}
  setSize() {}
  destroy() {}
} }));

const means = (rank: number, more: Partial<RankMeans> = {}): RankMeans =>
  ({ rank, node: rank >> 1, host: `node-${rank >> 1}`, step_s: 1, data_s: 0, others_s: 0.2,
    own_s: 0.8, peers_s: 0.8, slow_share: 0, is_straggler: false, ...more });

const map = (more: Partial<HeatMap> = {}): HeatMap =>
  ({ run: "gpt", attempt: 1, value: "step", start_s: 1_764_000_000, bucket_s: 10, buckets: 4,
    first_rank: 0, ranks_total: 4, alphabet: " abcdefghijklmnop", lowest_s: 0.5, ratio: 2,
    rows: ["abab", "bbbb", " aap", "    "],
    hosts: [{ node: 0, host: "node-0", first_rank: 0, ranks: 2 },
      { node: 1, host: "node-1", first_rank: 2, ranks: 2 }],
    launches: [{ launch: 1, start_s: 1_764_000_000 }],
    worst: [means(2, { slow_share: 0.25, is_straggler: true, data_s: 0.7 }), means(0)],
    problems: [], ...more });

const GPU: GpuSeries["gpus"][0] =
  { index: 0, uuid: "GPU-0", memory_total_bytes: 80 * 2 ** 30, utilisation_percent: [90, 95, null],
    memory_bytes: [2 ** 30, 2 ** 31, null], temperature_c: [60, 61, null],
    power_w: [null, null, null], ecc_errors: [0, 2, null], xids: [0, 79, null] };

const gpus = (more: Partial<GpuSeries> = {}): GpuSeries =>
  ({ run: "gpt", attempt: 1, nodes: [{ node: 0, host: "node-0" }, { node: 1, host: "node-1" }],
    node: 0, start_s: 1_764_000_000, bucket_s: 10, buckets: 3, gpus: [GPU], problems: [],
    ...more });

const NONE = gpus({ nodes: [], node: null, buckets: 0, gpus: [] });

const openRanks = (heat: HeatMap, series = NONE, attempts = [attempt({})]) =>
  openPage("/runs/gpt/ranks", {
    "GET /runs/gpt": run({ attempts }),
    "GET /runs/gpt/heat-map": heat,
    "GET /runs/gpt/gpus": series,
    "GET /runs/gpt/heartbeats": { run: "gpt", attempt: 1, nodes: [], clock_problems: [] },
  });

describe("the cells of a heat map", () => {
  it("have the values of the answer", () => {
    const cells = cellsOf(map());
    expect([...cells.levels]).toEqual([1, 2, 1, 2, 2, 2, 2, 2, 0, 1, 1, 16, 0, 0, 0, 0]);
    expect(levelAt(cells, { row: 2, bucket: 3 })).toBe(16);
    expect([0, 1, 2, 4].map((level) => valueOf(map(), level))).toEqual([null, 0.5, 1, 4]);
  });

  it("show the largest value where ranks share a row of the image", () => {
    const cells = cellsOf(map({ rows: Array.from({ length: 100 }, (_, n) => n === 37 ? "p" : "a"),
      buckets: 1 }));
    const palette = Uint32Array.from({ length: 256 }, (_, level) => level);
    const image = new Uint32Array(10);
    paint(image, 10, cells, { from: 0, to: 100 }, palette);
    expect([...image]).toEqual([1, 1, 1, 16, 1, 1, 1, 1, 1, 1]);
    paint(image, 10, cells, { from: 35, to: 40 }, palette);
    expect([...image]).toEqual([1, 1, 1, 1, 16, 16, 1, 1, 1, 1]);
  });

  it("have colours that one outlier does not spoil, and that do not exaggerate noise", () => {
    const levels = new Uint8Array(10_000).fill(20);
    levels[77] = 90;
    expect(scaleOf({ levels, ranks: 100, buckets: 100 })).toEqual({ low: 20, high: 23 });
    expect(scaleOf({ levels: new Uint8Array(4), ranks: 2, buckets: 2 }).low).toBe(1);
    const palette = paletteOf([[0, 0, 0], [200, 100, 0]], { low: 10, high: 20 });
    const bytes = new Uint8Array(palette.buffer);
    const at = (level: number) => [...bytes.slice(4 * level, 4 * level + 4)];
    expect(at(0)).toEqual([0, 0, 0, 0]);
    expect([at(3), at(15), at(200)]).toEqual(
      [[0, 0, 0, 255], [100, 50, 0, 255], [200, 100, 0, 255]]);
  });

  it("are reached by keys, which stop at the ends", () => {
    const cells = cellsOf(map());
    expect(moved(null, "ArrowDown", cells)).toEqual({ row: 0, bucket: 3 });
    expect(moved({ row: 0, bucket: 3 }, "ArrowRight", cells)).toEqual({ row: 0, bucket: 3 });
    expect(moved({ row: 0, bucket: 3 }, "PageDown", cells)).toEqual({ row: 3, bucket: 3 });
    expect(moved({ row: 2, bucket: 3 }, "Home", cells)).toEqual({ row: 2, bucket: 0 });
    expect(moved({ row: 2, bucket: 3 }, "Tab", cells)).toBeNull();
    expect(hostOf(map().hosts, 3)?.host).toBe("node-1");
    expect(hostOf(map().hosts, 4)).toBeUndefined();
  });
});

describe("ranks over time", () => {
  it("name the straggler, and the rank, host and value at the cursor", async () => {
    openRanks(map());
    await screen.findByText(/rank 2 on node-1 \(25.0 % of the time\)/);
    expect(rowsOf("Slowest ranks")[0]).toMatch(/2node-125.0 %800 ms1 s700 ms200 ms$/);
    const heat = screen.getByRole("application");
    fireEvent.keyDown(heat, { key: "ArrowDown" });
    fireEvent.keyDown(heat, { key: "ArrowDown" });
    fireEvent.keyDown(heat, { key: "Home" });
    const reading = () => document.querySelector(".heat-read")?.textContent;
    expect(reading()).toMatch(/^Rank 1 on node-0 · step time 1 s · .*2025/);
    fireEvent.click(within(screen.getByRole("region", { name: "Slowest ranks" }))
      .getByRole("button", { name: "Show rank 2" }));
    expect(reading()).toMatch(/^Rank 2 on node-1 · no step/);
  });

  it("ask for another value, a range of time and an attempt", async () => {
    const attempts = [attempt({}), attempt({ number: 2 })];
    const server = openRanks(map({ worst: [means(0)] }), NONE, attempts);
    await screen.findByText("No rank was much slower than its peers.");
    server.give({ "GET /runs/gpt/heat-map": map({ value: "data" }) });
    fireEvent.change(screen.getByLabelText("Show"), { target: { value: "data" } });
    await screen.findByRole("application", { name: /^Wait for data of 4 ranks/ });
    fireEvent.change(screen.getByLabelText("Attempt"), { target: { value: "1" } });
    fireEvent.change(screen.getByLabelText("Time"), { target: { value: "1" } });
    const last = () => server.requests("GET /runs/gpt/heat-map").at(-1)?.query;
    await expect.poll(last).toEqual(
      { value: "data", attempt: "1", time_from: String(1_764_000_000 - 3600) });
  });

  it("are one text if nothing is recorded, and if there was no attempt", async () => {
    const nothing = map({ buckets: 0, rows: [], worst: [] });
    for (const attempts of [[attempt({})], []]) {
      openRanks(nothing, NONE, attempts);
      await screen.findByText("Nothing is recorded of the ranks yet");
      expect(screen.queryByText(/No steps recorded yet|No data of GPUs|No heartbeats/)).toBeNull();
      cleanup();
    }
    openRanks(nothing, gpus());
    await screen.findByText("No steps recorded yet");
  });

  it("say that there are none, and which file is damaged", async () => {
    openRanks(map({ buckets: 0, rows: [], worst: [], problems: ["ranks-0000.1.bin: damaged"] }));
    await screen.findByText("No steps recorded yet");
    await screen.findByText("ranks-0000.1.bin: damaged");
    await screen.findByText(/No data of GPUs/);
  });
});

describe("GPUs over time", () => {
  it("have ticks at whole numbers only, as their texts have no decimals", () => {
    const drawn = { x: [0], lines: [[0]], label: "New ECC errors", format: count };
    const [, axis] = trackOptions(drawn, document.createElement("div")).axes ?? [];
    const increments = axis?.incrs as number[];
    expect(increments.slice(0, 4)).toEqual([1, 2, 5, 10]);
    expect(increments.every(Number.isInteger)).toBe(true);
  });

  it("have faults as text, charts, and the newest values", async () => {
    const server = openRanks(map(), gpus());
    await screen.findByText(/GPU 0: Xid 79, .*2025/);
    await screen.findByText("GPU 0: new uncorrected ECC errors");
    await screen.findByText("not reported");
    expect(rowsOf("Newest values of each GPU")[0]).toBe(" 095 %2.00 GiB61 °C–GPU-0");
    expect(screen.getByRole("img", { name: "Utilisation, now 95 %" })).toBeTruthy();
    fireEvent.change(screen.getByLabelText("Node"), { target: { value: "1" } });
    const nodes = () => server.requests("GET /runs/gpt/gpus").map(({ query }) => query.node);
    await expect.poll(nodes).toEqual([undefined, "1"]);
  });
});
