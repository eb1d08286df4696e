import { describe, expect, it } from "vitest";
import { SILENT_MS, connectionOf, type Link } from "./api/link";

const link = (fields: Partial<Link>): Link => ({
  isOpen: true, hasFailed: false, heardAt: 0, answered: true, ...fields,
});

describe("connectionOf", () => {
  it("is live only while the stream works", () => {
    expect(connectionOf(link({}), SILENT_MS)).toBe("live");
    expect(connectionOf(link({ answered: null }), SILENT_MS + 1)).toBe("connecting");
    expect(connectionOf(link({ answered: false }), SILENT_MS + 1)).toBe("away");
  });

  it("stays live if one request fails and the stream works", () => {
    expect(connectionOf(link({ answered: false }), 1000)).toBe("live");
  });

  it("polls if requests work and the stream does not", () => {
    const failed = link({ isOpen: false, hasFailed: true });
    expect(connectionOf(failed, 0)).toBe("polling");
    expect(connectionOf({ ...failed, answered: false }, 0)).toBe("away");
    expect(connectionOf({ ...failed, hasFailed: false }, 0)).toBe("connecting");
  });
});
