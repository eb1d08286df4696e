import { describe, expect, it } from "vitest";
import type { Graph, GraphEdge, GraphNode } from "./api/types";
import { drawn, isIn, type Fold } from "./fold";

const id = (step: number, attempt = 1) =>
  `gpt:step-${String(step).padStart(8, "0")}.a000${attempt}.l01`;

/** One attempt with `count` checkpoints, each the parent of the next. */
function line(count: number): Graph {
  const nodes: GraphNode[] = [
    { id: "gpt", kind: "run", run: "gpt", state: "running" },
    { id: "gpt:attempt-1", kind: "attempt", run: "gpt", number: 1, state: "running" },
  ];
  const edges: GraphEdge[] = [];
  for (let step = 1; step <= count; step += 1) {
    nodes.push({ id: id(step), kind: "checkpoint", run: "gpt", state: "committed", step });
    if (step > 1) edges.push({ from: id(step), to: id(step - 1), kind: "parent" });
  }
  return { nodes, edges };
}

describe("the drawn lineage", () => {
  it("has its edges in the order of time, from the attempt to its first checkpoint", () => {
    const { edges } = drawn(line(3));
    expect(edges).toEqual([
      { from: id(1), to: id(2), kind: "parent" },
      { from: id(2), to: id(3), kind: "parent" },
      { from: "gpt:attempt-1", to: id(1), kind: "made" },
      { from: "gpt", to: "gpt:attempt-1", kind: "made" },
    ]);
  });

  it("knows what was in a fold that was opened", () => {
    const fold = (first_step: number, last_step: number): Fold => ({ id: `${first_step}`,
      kind: "fold", run: "gpt", rolled_back: false, count: 9, first_step, last_step });
    const opened = fold(10, 90);
    const made = { id: id(20), kind: "checkpoint", run: "gpt", rolled_back: false, step: 20 };
    expect([fold(10, 40), fold(91, 99), made, { ...made, step: 91 }, { ...made, run: "b" }]
      .map((one) => isIn(one, opened))).toEqual([true, false, true, false, false]);
  });

  it("draws a restart in place forwards", () => {
    const graph = line(40);
    // The second launch resumed from step 20. The first one had continued to step 40.
    const again = (step: number) => id(step).replace(/l\d+$/, "l02");
    for (const step of [21, 22, 23]) {
      graph.nodes.push({ id: again(step), kind: "checkpoint", run: "gpt", state: "committed", step,
        pinned: false, rolled_back: false });
      graph.edges.push(
        { from: again(step), to: step === 21 ? id(20) : again(step - 1), kind: "parent" });
    }
    graph.edges.push({ from: "gpt:attempt-0001", to: id(20), kind: "resumed_from" });
    const { edges } = drawn(graph);
    expect(edges).toContainEqual({ from: id(20), to: again(21), kind: "resumed_from" });
    expect(edges.some((edge) => edge.to === "gpt:attempt-0001" && edge.from === id(20)))
      .toBe(false);
  });
});
