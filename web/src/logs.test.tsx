// @vitest-environment happy-dom
import { fireEvent, screen, waitFor } from "@testing-library/react";
import { describe, expect, it } from "vitest";
import type { LogMatch, LogSearch, RunLog, RunLogPart } from "./api/schema";
import { attempt, run } from "./samples";
import { button, openPage, problem } from "./testbed";

const log = (fields: Partial<RunLog>): RunLog => ({
  file: "attempts/0001/logs/node-0000/l01/rank-00000.stdout.log", kind: "rank", attempt: 1,
  node: 0, launch: 1, rank: 0, stream: "stdout", bytes: 30, changed_at: 0, ...fields,
});
const RANK_1 = log({ file: "rank-1", rank: 1, stream: "stderr" });
const FILES: RunLog[] = [
  log({}), RANK_1,
  log({ file: "torchrun.log", kind: "torchrun", rank: null, stream: null }),
  log({ file: "logs/41_0_log.err", kind: "agent", node: null, launch: null, rank: null }),
  log({ file: "flow.log", kind: "supervisor", attempt: null, node: null, launch: null, rank: null,
    stream: null }),
];
const part = (fields: Partial<RunLogPart>): RunLogPart => ({
  run: "gpt", file: "", offset: 0, next_offset: 30, bytes: 30, text: "one\ntwo\n", ended: true,
  ...fields,
});
const match = (fields: Partial<LogMatch>): LogMatch =>
  ({ ...RANK_1, offset: 4, text: "ValueError: no", ...fields });
const found = (fields: Partial<LogSearch>): LogSearch =>
  ({ matches: [], next: null, searched_bytes: 1024, searched_files: 1, ...fields });

const opened = (answers: Parameters<typeof openPage>[1] = {}, end = "") =>
  openPage(`/runs/gpt/logs${end}`, {
    "GET /runs/gpt": run({ attempts: [attempt({})] }),
    "GET /runs/gpt/log-files": FILES,
    "GET /runs/gpt/log-files/part": part({}),
    ...answers,
  });

describe("the logs of a run", () => {
  it("are those of all processes, and one is shown and can be downloaded", async () => {
    opened();
    await screen.findByText(/End of log/);
    expect(screen.getByRole("region", { name: /^rank 0 · launch 1 · stdout/ }).textContent)
      .toBe("one\ntwo\n");
    const groups = [...screen.getByLabelText("File").querySelectorAll("optgroup")];
    expect(groups.map((one) => one.label)).toEqual(["rank", "torchrun", "agent", "supervisor"]);
    expect(screen.getByText(/^agent · 41_0_log.err/)).toBeTruthy();
    expect(screen.getByText("Download").getAttribute("href")).toBe(
      `/api/v1/runs/gpt/log-files/download?file=${encodeURIComponent(log({}).file)}`);
  });

  it("say by how much the view lags, and can skip to the end", async () => {
    const server = opened({ "GET /runs/gpt/log-files/part": ({ query }) =>
      part({ offset: Number(query.offset ?? 0), next_offset: Number(query.offset ?? 0) + 4,
        bytes: 2 ** 24, ended: false }) });
    fireEvent.click(await button("Skip to the end"));
    await waitFor(() => {
      const asked = server.requests("GET /runs/gpt/log-files/part");
      expect(asked.filter((one) => one.query.offset === undefined)).toHaveLength(2);
    });
  });

  it("of many ranks are listed by node, and found by the rank's number", async () => {
    const many = Array.from({ length: 600 }, (_, rank) =>
      log({ file: `rank-${rank}`, rank, node: Math.floor(rank / 8) }));
    opened({ "GET /runs/gpt/log-files": many });
    const list = await screen.findByLabelText("File");
    expect(list.querySelectorAll("option")).toHaveLength(8);
    fireEvent.change(screen.getByLabelText("Rank"), { target: { value: "599" } });
    fireEvent.click(await button("Show rank"));
    await screen.findByRole("region", { name: /^rank 599 / });
    expect(list.querySelector("option")?.textContent).toContain("rank 592 ");
  });

  it("are not called empty before the server has answered", async () => {
    const server = opened({ "GET /runs/gpt/log-files/part": problem(503, "not available") });
    await screen.findByText("Not following: the server did not send the log.");
    expect(screen.queryByText("Empty")).toBeNull();
    server.give({ "GET /runs/gpt/log-files/part": part({ text: "", next_offset: 0, bytes: 0 }) });
    await screen.findByText("Empty");
  });

  it("are searched step by step, and a line that was found is shown in its place", async () => {
    let steps = 0;
    const server = opened({
      "GET /runs/gpt/log-files/search": ({ query }) => {
        steps += 1;
        return query.after ? found({ matches: [match({})] }) : found({ next: "9:x" });
      },
      "GET /runs/gpt/log-files/part": ({ query }) =>
        query.before ? part({ text: "one\n", next_offset: 4 })
          : query.offset === "4" ? part({ offset: 4, text: "ValueError: no\nlast\n" }) : part({}),
    });
    fireEvent.change(await screen.findByLabelText("Find"), { target: { value: "error" } });
    fireEvent.click(await button("Find"));
    await screen.findByText("“error”: 1 line found; searched all, 2.00 KiB in 2 files.");
    expect(steps).toBe(2);
    expect(server.requests("GET /runs/gpt/log-files/search").at(-1)?.query).toEqual(
      { text: "error", limit: "100", after: "9:x" });
    fireEvent.click(await button("attempt 1 · rank 1 · launch 1 · stderr ValueError: no"));
    const shown = await screen.findByText("ValueError: no", { selector: "mark" });
    expect(shown.parentElement?.textContent).toBe("one\nValueError: no\nlast\n");
    fireEvent.click(await button("Show the end"));
    await screen.findByText(/End of log/);
  });

  it("jump to the first error of a file", async () => {
    const server = opened({
      "GET /runs/gpt/log-files/search": found({ matches: [match({ file: FILES[0]?.file })] }),
    });
    fireEvent.click(await button("First error"));
    await screen.findByText("Show the end");
    expect(server.requests("GET /runs/gpt/log-files/search")[0]?.query).toEqual(
      { errors: "true", file: log({}).file, limit: "1" });
  });

  it("say that there is no error, and that the server did not search", async () => {
    const server = opened({ "GET /runs/gpt/log-files/search": found({}) });
    fireEvent.click(await button("First error"));
    await screen.findByText("No error found");
    server.give({ "GET /runs/gpt/log-files/search": problem(503, "the storage is not available") });
    fireEvent.click(await button("Find errors"));
    await screen.findByText("the storage is not available");
  });
});
