// @vitest-environment happy-dom
import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import { describe, expect, it, vi } from "vitest";
import type { RunsComparison, Series } from "./api/schema";
import { attempt, checkpoint, ID, line, run } from "./samples";
import { openPage, problem, rowsOf } from "./testbed";

// The edge: no canvas here. A chart is its label, its lines and what is drawn of them.
vi.mock("uplot", () => ({ default: class {
  static join = (tables: unknown[][]) => tables.flat();
  data: unknown;
  root = document.createElement("div");
  cursor = {};
  scales = {};
  over = document.createElement("div");
  constructor(options: { series: { label: string }[] }, data: unknown, place: HTMLElement) {
    this.data = data;
    this.root.textContent = options.series.map((one) => one.label).join("|");
    place.append(this.root);
  }
  setData(data: unknown) { this.data = data; }
  setSize() {}
  redraw() {}
  setCursor() {}
  destroy() { this.root.remove(); }
} }));
vi.mock("uplot/dist/uPlot.min.css", () => ({}));

const series = (values: Record<string, (number | null)[]>, from = 1): Series => ({
  attempt: 1, launch: 1,
  points: [1, 2, 3].map((number, index) => ({
    step: from + number * 10, time: "", time_s: 1_767_261_600 + number * 10, steps_per_s: 1,
    values: Object.fromEntries(Object.entries(values).map(([name, all]) =>
      [name, { last: all[index] ?? null, low: null, high: null }])),
  })),
});

const FORK = run({ run: "vit", uid: "uid-vit", forked_from: "gpt:step-00000020.a0001.l01" });
const COMPARED: RunsComparison = { runs: ["gpt", "vit"], left_out: 0, facts: [
  { group: "arguments", name: "--lr", values: ["0.1", "0.01"], is_same: false },
  { group: "settings", name: "elastic.min_gpus", values: [1, 1], is_same: true },
  { group: "environment", name: "versions.torch", values: ["2.9", "2.10"], is_same: false },
] };
const TWO = {
  "GET /runs/vit": FORK,
  "GET /runs/gpt/metrics": [series({ loss: [3, 2, 1], lr: [0.1, 0.1, 0.1], tokens: [1, 2, 3] })],
  "GET /runs/vit/metrics": [series({ loss: [2, null, 0] }, 20)],
  "GET /compare/runs": COMPARED,
};
const chart = (name: RegExp) => screen.findByRole("group", { name });
const href = (link: HTMLElement) => link.getAttribute("href");

describe("the curves of a run", () => {
  it("say what is drawn, and keep the choice in the address", async () => {
    openPage("/runs/gpt?log=true&smooth=0.9&from=12&to=25", TWO);
    expect((await chart(/^loss: 3 points, now 1/)).textContent).toBe("step|loss|gpt, not smoothed");
    expect(screen.getByLabelText<HTMLInputElement>("Log scale").checked).toBe(true);
    expect(screen.getByLabelText<HTMLSelectElement>("Smoothing").value).toBe("0.9");
    expect(screen.getByText("12 – 25")).toBeTruthy();
    fireEvent.click(screen.getByRole("button", { name: "Reset zoom" }));
    await waitFor(() => expect(screen.queryByText("12 – 25")).toBeNull());
    fireEvent.change(screen.getByLabelText("Axis"), { target: { value: "tokens" } });
    await waitFor(() => expect(screen.queryByRole("group", { name: /^tokens/ })).toBeNull());
  });

  it("can be zoomed by keys", async () => {
    openPage("/runs/gpt", TWO);
    fireEvent.keyDown(await chart(/^loss/), { key: "+" });
    await screen.findByText("16 – 26");
    fireEvent.keyDown(await chart(/^loss/), { key: "ArrowRight", shiftKey: true });
    await screen.findByText("18.5 – 28.5");
    fireEvent.keyDown(await chart(/^loss/), { key: "0" });
    await waitFor(() => expect(screen.queryByText("18.5 – 28.5")).toBeNull());
  });

  it("can be downloaded, each of them alone, too", async () => {
    openPage("/runs/gpt", TWO);
    await chart(/^loss/);
    const link = screen.getByRole("link", { name: "Download loss as CSV" });
    expect(href(link)).toBe("/api/v1/tables/curves?run=gpt&name=loss&format=csv");
    expect(href(screen.getByRole("link", { name: "Download all curves as JSON" })))
      .toBe("/api/v1/tables/curves?run=gpt&format=json");
    expect(href(screen.getByRole("link", { name: "Download steps per second as CSV" })))
      .toContain("name=steps_per_s");
  });

  it("report values that are not numbers, and those that a logarithm cannot show", async () => {
    openPage("/runs/gpt?log=true", {
      "GET /runs/gpt/metrics": [series({ loss: [1, 0, null], gain: [-1, -2, -3] })] });
    const heading = await screen.findByRole("heading", { name: /^loss/ });
    expect(heading.textContent).toContain("not a finite number");
    expect(heading.textContent).toContain("1 value ≤ 0 is not drawn");
    // Without any positive value, the axis is linear.
    expect(screen.getByRole("heading", { name: /^gain/ }).textContent).not.toContain("≤ 0");
  });

  it("are drawn over those of the parent by one click", async () => {
    openPage("/runs/vit", { ...TWO, "GET /runs/vit/checkpoints": { items: [], next: null } });
    fireEvent.click(await screen.findByRole("button", { name: "Over its parent gpt" }));
    expect((await chart(/^loss of vit, gpt/)).textContent).toBe("step|vit|gpt");
    expect(screen.getByText("step 20: fork of gpt")).toBeTruthy();
    expect(href(screen.getByRole("link", { name: "Compare with other runs" })))
      .toBe("/compare?runs=vit%2Cgpt");
  });
});

describe("the comparison of runs", () => {
  it("shows their curves together, and only what differs", async () => {
    openPage("/compare?runs=gpt,vit", TWO);
    expect((await chart(/^loss of gpt, vit/)).textContent).toBe("step|gpt|vit");
    expect(await screen.findByText("--lr")).toBeTruthy();
    expect(screen.queryByText("elastic.min_gpus")).toBeNull();
    fireEvent.click(screen.getByLabelText("Show identical"));
    expect(await screen.findByText("elastic.min_gpus")).toBeTruthy();
  });

  it("adds a run that is found by a part of its name, and removes it", async () => {
    const server = openPage("/compare?runs=gpt", { ...TWO,
      "GET /runs": ({ query }) => ({ next: null, unreadable: [],
        items: ["gpt", "vit"].filter((one) => one.includes(query.search ?? ""))
          .map((one) => line(one)) }) });
    const box = await screen.findByRole("combobox", { name: "Add a run" });
    fireEvent.focus(box);
    fireEvent.click(box);
    fireEvent.change(box, { target: { value: "vi" } });
    fireEvent.click(await screen.findByRole("option", { name: /^vit/ }));
    await chart(/^loss of gpt, vit/);
    expect(server.requests("GET /runs").some((one) => one.query.search === "vi")).toBe(true);
    fireEvent.click(screen.getByRole("button", { name: "Remove vit" }));
    await chart(/^loss: 3 points/);
  });

  it("says which run is unknown", async () => {
    openPage("/compare?runs=gpt,vit", { ...TWO,
      "GET /runs/vit": problem(404, "vit: no such run") });
    expect((await screen.findAllByText(/vit: no such run/)).length).toBeGreaterThan(0);
    await chart(/^loss: 3 points/);
  });
});

describe("the comparison of checkpoints", () => {
  it("chooses them by name, word and step", async () => {
    const keep = { checkpoint: { keep: { best: { metric: "loss", mode: "min", n: 1 } } } };
    openPage("/compare?what=checkpoints", {
      "GET /runs": { next: null, unreadable: [], items: [line("gpt")] },
      "GET /runs/gpt": run({ spec: keep }),
      "GET /runs/gpt/checkpoints": { next: null, items: [
        checkpoint({ is_best: true, metrics: { loss: 1.5 } })] },
      "GET /compare": { one: ID, other: ID, common_ancestor: ID, facts: [], config: [
        { name: "elastic.min_gpus", one: 1, other: 1, is_same: true }], metrics: [] },
    });
    for (const side of ["A", "B"]) {
      const box = await screen.findByRole("combobox", { name: `Run ${side}` });
      fireEvent.change(box, { target: { value: "gp" } });
      const runs = await screen.findByRole("listbox", { name: `Run ${side}` });
      fireEvent.click(await within(runs).findByRole("option", { name: /^gpt/ }));
      await screen.findByRole("combobox", { name: `Checkpoint ${side}` });
    }
    const box = await screen.findByRole("combobox", { name: "Checkpoint A" });
    expect((box as HTMLInputElement).value).toBe("latest");
    fireEvent.change(box, { target: { value: "e" } });
    const list = await screen.findByRole("listbox", { name: "Checkpoint A" });
    await waitFor(() => expect(within(list).getAllByRole("option").map((one) => one.textContent))
      .toEqual(["latest the one that the run would resume from", "best by loss",
        expect.stringMatching(/^step-00000200.*best · loss 1\.5$/)]));
    fireEvent.click(within(list).getByRole("option", { name: /^best/ }));
    expect(await screen.findByText("0 of 1")).toBeTruthy();
  });
});

describe("a run", () => {
  it("says why each attempt had its size, and links to its trackers", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": run({
      attempts: [
        attempt({ number: 1, state: "preempted", cause: "preemption", gpus: 8 }),
        attempt({ number: 2, state: "failed", cause: "user_error", gpus: 4,
          reason: "after node_failure of attempt 1: 4 GPUs (4 are free)" }),
        attempt({ number: 3, state: "failed", cause: "user_error",
          reason: "relaunch at 2 GPUs by mia" }),
      ],
      trackers: [
        { tracker: "wandb", tracker_id: "x1", url: "https://wandb.ai/team/p/runs/x1" },
        { tracker: "tensorboard", tracker_id: "/runs/gpt/tensorboard", url: null },
      ] }) });
    expect(await screen.findByText("started after node failure of attempt 1: 4 GPUs (4 are free)"))
      .toBeTruthy();
    expect(screen.getByText("started by relaunch at 2 GPUs by mia")).toBeTruthy();
    expect(href(screen.getByRole("link", { name: "wandb" })))
      .toBe("https://wandb.ai/team/p/runs/x1");
    expect(screen.getByText("tensorboard").title).toBe("/runs/gpt/tensorboard");
  });

  it("lists checkpoints with their metrics, in the order and columns of the address", async () => {
    const at = (step: number, metrics: Record<string, number>, is_best = false) => checkpoint({
      id: `gpt:step-${String(step).padStart(8, "0")}.a0001.l01`, step, metrics, is_best });
    openPage("/runs/gpt/checkpoints?sort=metric%20loss", {
      "GET /runs/gpt/checkpoints": { next: null, items: [
        at(300, { loss: 2, d: 1, c: 1, b: 1 }), at(200, { loss: 1 }, true)] } });
    await screen.findByText(/· best/);
    expect(rowsOf("Checkpoints").map((text) => text?.slice(0, 3))).toEqual(["200", "300"]);
    expect(screen.getAllByRole("columnheader").map((one) => one.textContent?.trim()))
      .toEqual(["Step", "State", "Retention", "loss ▲", "b", "c", "Trigger", "Attempt", "Ranks",
        "Size", "Blocked", "Flush", "Committed"]);
    fireEvent.click(screen.getByLabelText("Blocked"));
    await waitFor(() => expect(screen.queryByRole("columnheader", { name: "Blocked" })).toBeNull());
    fireEvent.click(screen.getByLabelText("d"));
    expect(await screen.findByRole("columnheader", { name: "d" })).toBeTruthy();
    fireEvent.click(screen.getByText("Usual columns"));
    expect(await screen.findByRole("columnheader", { name: "Blocked" })).toBeTruthy();
  });
});
