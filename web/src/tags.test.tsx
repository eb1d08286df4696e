// @vitest-environment happy-dom
import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import { beforeEach, describe, expect, it, vi } from "vitest";
import { changeOf, tagsIn } from "./annotation";
import type { AnnotationDone, RunLine, RunPage } from "./api/schema";
import { readRunsSearch, readValue, text } from "./runsSearch";
import { changeViews, isSame, savedViews, viewOf, VIEWS_MAX, withView } from "./savedViews";
import { detail, ID, line, run } from "./samples";
import { ANNOTATE, begin, button, DETAIL, openPage, problem, rowsOf, SESSION } from "./testbed";

const page = (items: RunLine[]): RunPage => ({ items, next: null, unreadable: [] });
const GPT = line("gpt", { tags: ["llm", "2024"] });
const VIT = line("vit");

const done = (fields: Partial<AnnotationDone>): AnnotationDone => ({
  run: "gpt", checkpoint: null, tags: [], note: null, note_by: null, note_at: null, ...fields,
});

const stored = () => savedViews().map((one) => one.name);
const KEY = "holdfast.views";

beforeEach(() => localStorage.clear());

describe("an edit of tags and a note", () => {
  it("is the difference to what was there", () => {
    const before = { tags: ["a", "b"], note: "old" };
    expect(tagsIn("  b, c\tc\n")).toEqual(["b", "c"]);
    expect(changeOf(before, ["b", "c"], "old")).toEqual({ add: ["c"], remove: ["a"] });
    expect(changeOf(before, ["a", "b"], "old ")).toBeNull();
    expect(changeOf(before, ["a", "b"], "")).toEqual({ note: "" });
    expect(changeOf({ tags: [], note: null }, [], "")).toBeNull();
  });
});

describe("the tags in the list of runs", () => {
  it("filter it by a click, and keep the other filters", async () => {
    const server = openPage("/?state=running", { "GET /runs": ({ query: { tag } }) =>
      page([GPT, VIT].filter((one) => !tag || one.tags.includes(tag))) });
    fireEvent.click(await screen.findByRole("link", { name: "2024" }));
    await waitFor(() => expect(rowsOf("Runs")).toHaveLength(1));
    expect(server.requests("GET /runs").at(-1)?.query).toMatchObject(
      { tag: "2024", state: "running" });
    expect(screen.getByText("Filters (1)")).toBeTruthy();
    expect(screen.getByLabelText<HTMLSelectElement>("Tag").value).toBe("2024");
    fireEvent.change(screen.getByLabelText("Tag"), { target: { value: "night" } });
    await screen.findByText("No matching runs");
    expect(screen.getByText("Show all runs")).toBeTruthy();
  });

  it("are in the address, where one may look like a number", () => {
    expect(readRunsSearch({ tag: 2024 }).tag).toBe("2024");
    expect(readRunsSearch({ tag: ["a"] }).tag).toBeUndefined();
    const names = ["search", "state", "user", "cause", "partition", "account", "tag"] as const;
    for (const name of names) expect(readRunsSearch({ [name]: 2024 })[name]).toBe("2024");
    const given = ["2024", "1e5", "1.0", "12345678901234567890", "null", "true", '"2024"'];
    expect(given.map((one) => text(readValue(one)))).toEqual(
      ["2024", "1e5", "1.0", "12345678901234567890", "null", "true", "2024"]);
  });
});

describe("the tags and the note of a run", () => {
  const NOTED = run({ tags: ["llm"], note: "bad data\nsee wiki", note_by: "ben",
    note_at: "2026-01-01T10:00:00Z" });

  it("are under its name, and lead to the runs with the tag", async () => {
    const server = openPage("/runs/gpt", { "GET /runs/gpt": NOTED, "GET /runs": page([GPT]) });
    expect((await screen.findByText(/bad data/)).textContent).toBe("bad data\nsee wiki");
    expect(screen.getByText("ben")).toBeTruthy();
    fireEvent.click(screen.getByRole("link", { name: "llm" }));
    await waitFor(() =>
      expect(server.requests("GET /runs").at(-1)?.query.tag).toBe("llm"));
  });

  it("are changed in a dialog, which sends only the difference", async () => {
    const server = openPage("/runs/gpt", { "GET /runs/gpt": NOTED,
      "POST /runs/gpt/annotate": done({ tags: ["eval", "late"] }) });
    const dialog = await begin("Tags and note");
    const save = dialog.getByRole<HTMLButtonElement>("button", { name: "Save" });
    expect(save.disabled).toBe(true);
    expect(dialog.getByLabelText<HTMLTextAreaElement>("Note").value).toBe("bad data\nsee wiki");
    fireEvent.change(dialog.getByLabelText("Tags, separated by spaces"),
      { target: { value: "eval" } });
    fireEvent.click(save);
    expect((await dialog.findByRole("status")).textContent).toBe("Saved. Tags: eval, late.");
    expect(server.requests()).toMatchObject([{ request: "POST /runs/gpt/annotate",
      body: { add: ["eval"], remove: ["llm"] }, csrf: "csrf-word" }]);
    expect(Object.keys(server.requests()[0]?.body as object)).toEqual(["add", "remove"]);
  });

  it("stay in the dialog if the server refuses or is away", async () => {
    const server = openPage("/runs/gpt", { "GET /runs/gpt": NOTED,
      "POST /runs/gpt/annotate": problem(401, "The session has ended.") });
    const dialog = await begin("Tags and note");
    fireEvent.change(dialog.getByLabelText("Note"), { target: { value: "long text" } });
    fireEvent.click(dialog.getByRole("button", { name: "Save" }));
    expect((await dialog.findByRole("alert")).textContent).toContain("The session has ended.");
    server.give({ "POST /runs/gpt/annotate": "away" });
    fireEvent.click(dialog.getByRole("button", { name: "Save" }));
    await waitFor(() => expect(dialog.getByRole("alert").textContent).toContain(
      "the change may have been applied"));
    expect(dialog.getByLabelText<HTMLTextAreaElement>("Note").value).toBe("long text");
    expect(server.requests()).toMatchObject([{ body: { note: "long text" } }, {}]);
  });

  it("show a note that someone else wrote meanwhile", async () => {
    const server = openPage("/runs/gpt", { "GET /runs/gpt": NOTED });
    const dialog = await begin("Tags and note");
    server.give({ "GET /runs/gpt": { ...NOTED, note: "fixed", note_by: "ann" } });
    await dialog.findByText(/ann changed the note meanwhile: fixed/);
  });

  it("cannot be changed by a reader", async () => {
    openPage("/runs/gpt",
      { "GET /runs/gpt": NOTED, "GET /session": { ...SESSION, role: "reader" } });
    await screen.findByText("Read-only");
    expect(screen.queryByText("Tags and note")).toBeNull();
    expect(screen.getByRole("link", { name: "llm" })).toBeTruthy();
  });
});

describe("the tags and the note of a checkpoint", () => {
  it("are on its page, and are changed there", async () => {
    const server = openPage(`/checkpoints/${ID}`, {
      [DETAIL]: detail({ tags: ["best"], note: "for the demo", note_by: "ann" }),
      [ANNOTATE]: done({ checkpoint: ID }),
    });
    await screen.findByText("for the demo");
    expect(within(screen.getByRole("list", { name: "Tags" })).getByText("best")).toBeTruthy();
    const dialog = await begin("Tags and note");
    fireEvent.change(dialog.getByLabelText("Note"), { target: { value: "" } });
    fireEvent.click(dialog.getByRole("button", { name: "Save" }));
    expect((await dialog.findByRole("status")).textContent).toBe("Saved. No tags.");
    expect(server.requests()).toMatchObject([{ request: ANNOTATE, body: { note: "" } }]);
  });
});

describe("saved views", () => {
  const open = () =>
    openPage("/?state=failed&user=ann&sort=-step", { "GET /runs": page([GPT, VIT]) });

  it("name the filters and the order, and open them again", async () => {
    const server = open();
    let dialog = await begin("Views");
    fireEvent.change(dialog.getByLabelText("Save the current filters as"),
      { target: { value: " my failed runs " } });
    fireEvent.click(dialog.getByRole("button", { name: "Save" }));
    expect(savedViews()).toEqual([
      { name: "my failed runs", search: { state: "failed", user: "ann", sort: "-step" } }]);
    fireEvent.click(dialog.getByRole("button", { name: "Close" }));
    await button("View: my failed runs");
    fireEvent.change(screen.getByLabelText("State"), { target: { value: "paused" } });
    dialog = await begin("Views");
    fireEvent.click(dialog.getByRole("link", { name: "my failed runs" }));
    await waitFor(() => expect(server.requests("GET /runs").at(-1)?.query).toMatchObject(
      { state: "failed", user: "ann", sort: "step", order: "desc" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  });

  it("are renamed, replaced and deleted, and a deletion can be undone", async () => {
    changeViews(() => [{ name: "a", search: { state: "failed" } },
      { name: "b", search: { user: "mia" } }]);
    open();
    const dialog = await begin("Views");
    fireEvent.click(dialog.getByRole("button", { name: "Rename a" }));
    const box = dialog.getByLabelText("New name of a");
    fireEvent.change(box, { target: { value: "b" } });
    // The name says that another view would be lost.
    expect(dialog.getByRole("button", { name: "Replace" })).toBeTruthy();
    fireEvent.change(box, { target: { value: "c" } });
    fireEvent.click(dialog.getByRole("button", { name: "Rename" }));
    await waitFor(() => expect(stored()).toEqual(["b", "c"]));
    fireEvent.click(dialog.getByRole("button", { name: "Delete b" }));
    await waitFor(() => expect(stored()).toEqual(["c"]));
    fireEvent.click(dialog.getByRole("button", { name: "Undo" }));
    await waitFor(() => expect(stored()).toEqual(["b", "c"]));
    expect(savedViews()[0]?.search).toEqual({ user: "mia" });
  });

  it("of another tab appear, and are not overwritten", async () => {
    open();
    const dialog = await begin("Views");
    localStorage.setItem(KEY, JSON.stringify([{ name: "other", search: { state: "paused" } }]));
    window.dispatchEvent(new Event("storage"));
    await dialog.findByRole("link", { name: "other" });
    changeViews((old) => withView(old, { name: "mine", search: {} }));
    expect(stored()).toEqual(["mine", "other"]);
  });

  it("that the browser does not keep are said to be lost", async () => {
    open();
    const dialog = await begin("Views");
    vi.stubGlobal("localStorage", {
      getItem: () => null,
      setItem: () => {
        throw new Error("quota");
      },
    });
    fireEvent.change(dialog.getByLabelText("Save the current filters as"),
      { target: { value: "x" } });
    fireEvent.click(dialog.getByRole("button", { name: "Save" }));
    expect((await dialog.findByRole("alert")).textContent).toContain("does not keep views");
  });

  it("are read from whatever the storage has", () => {
    for (const [content, names] of [
      ["{", []], ["5", []], ["null", []], ['{"name":"a"}', []],
      ['[null, 5, {"name":"a"}, {"name":5,"search":{}}, {"name":" ","search":{}}]', []],
      ['[{"name":"a","search":{"state":["x"],"evil":1}}, {"name":"a","search":{}}]', ["a"]],
      [JSON.stringify(Array.from({ length: 99 }, (_, n) => ({ name: `v${n}`, search: {} }))),
        VIEWS_MAX],
    ] as const) {
      localStorage.setItem(KEY, content);
      expect(typeof names === "number" ? stored().length : stored()).toEqual(names);
    }
    expect(viewOf({ state: "failed", focus: "search", refused: 401 })).toEqual({ state: "failed" });
    const again = { state: "b", user: "a", focus: "search" };
    expect(isSame({ user: "a", state: "b" }, again)).toBe(true);
  });
});
