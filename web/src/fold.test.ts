import { describe, expect, it } from "vitest";
import type { Graph, GraphEdge, GraphNode } from "./api/types";
import { fold, isFold, SHOWN_MAX, type Shown } from "./fold";

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

const folds = (nodes: Shown[]) => nodes.filter(isFold);
const members = (nodes: Shown[]) => folds(nodes).flatMap((one) => one.members);

describe("fold", () => {
  it("folds a chain of ten thousand checkpoints, except for its ends", () => {
    const { nodes, edges } = fold(line(10_000), new Set());
    expect(nodes.map((one) => one.kind).toSorted()).toEqual(
      ["attempt", "checkpoint", "checkpoint", "fold", "run"]);
    expect(folds(nodes)[0]).toMatchObject({ first_step: 2, last_step: 9_999 });
    // Run, attempt, first, fold, last: one path.
    expect(edges.map((edge) => edge.kind)).toEqual(["parent", "parent", "made", "made"]);
  });

  it("never hides a pin, a fork's parent, a rollback's end or an export", () => {
    const graph = line(60);
    for (const one of graph.nodes) {
      if (one.id === id(20)) one.pinned = true;
      if (one.step && one.step > 50) one.rolled_back = true;
    }
    graph.nodes.push({ id: "gpt-b", kind: "run", run: "gpt-b" });
    graph.nodes.push({ id: "/out/gpt.pt", kind: "export" });
    graph.edges.push({ from: "gpt-b", to: id(30), kind: "forked_from" });
    graph.edges.push({ from: id(40), to: "/out/gpt.pt", kind: "exported_to" });
    const hidden = new Set(members(fold(graph, new Set()).nodes));
    expect([1, 20, 30, 40, 60].filter((step) => hidden.has(id(step)))).toEqual([]);
    // A fold never mixes checkpoints that were rolled back with others.
    for (const one of folds(fold(graph, new Set()).nodes)) {
      expect(one.first_step > 50 || one.last_step <= 50).toBe(true);
    }
  });

  it("expands step by step and never shows too many nodes at once", () => {
    const graph = line(10_000);
    const open = new Set<string>();
    const seen: number[] = [];
    for (let depth = 0; depth < 6; depth += 1) {
      const { nodes } = fold(graph, open);
      seen.push(nodes.length);
      const hidden = members(nodes);
      const shown = nodes.filter((one) => one.kind === "checkpoint").length;
      expect(hidden.length + shown).toBe(10_000);
      const next = folds(nodes)[0];
      if (!next) break;
      open.add(next.id);
    }
    expect(Math.max(...seen)).toBeLessThan(5 * (SHOWN_MAX + 5));
  });

  it("keeps every edge between visible nodes", () => {
    const { nodes, edges } = fold(line(500), new Set());
    const there = new Set(nodes.map((one) => one.id));
    expect(edges.every((edge) => there.has(edge.from) && there.has(edge.to))).toBe(true);
  });

  it("draws a restart in place forwards, and keeps its checkpoint visible", () => {
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
    const { nodes, edges } = fold(graph, new Set());
    expect(edges).toContainEqual({ from: id(20), to: again(21), kind: "resumed_from" });
    expect(edges.some((edge) => edge.to === "gpt:attempt-0001" && edge.from === id(20)))
      .toBe(false);
    expect(new Set(members(nodes)).has(id(20))).toBe(false);
  });

  it("accepts a cycle, as damaged manifests may have one", () => {
    const graph = line(30);
    graph.edges.push({ from: id(1), to: id(30), kind: "parent" });
    const { nodes } = fold(graph, new Set());
    const shown = nodes.filter((one) => one.kind === "checkpoint").length;
    expect(members(nodes).length + shown).toBe(30);
  });
});
