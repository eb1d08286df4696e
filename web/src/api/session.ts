// The login session and its CSRF token, which every write request needs.
import { useQuery, useQueryClient, type QueryClient } from "@tanstack/react-query";
import { useCallback } from "react";
import { get, remove, setCsrfToken } from "./client";

export interface Session {
  name: string | null;
  role: "reader" | "operator" | null;
  csrf: string | null;
  version: string;
}

interface Known extends Session {
  /** Whether this page was logged in before, and nobody logged out on it. */
  hasEnded: boolean;
}

async function ask({ client }: { client: QueryClient }): Promise<Known> {
  const session = await get<Session>("/session");
  setCsrfToken(session.csrf);
  const before = client.getQueryData<Known>(["session"]);
  const wasIn = before !== undefined && (before.name !== null || before.hasEnded);
  return { ...session, hasEnded: session.name === null && wasIn };
}

export const isLoggedOut = (session: Session | undefined): boolean =>
  session !== undefined && session.name === null;

export const useSession = () =>
  useQuery({ queryKey: ["session"], queryFn: ask, staleTime: Number.POSITIVE_INFINITY });

/** Whether the user may change anything. The server enforces this; here it hides buttons. */
export const useMayAct = (): boolean => (useSession().data?.role ?? "operator") === "operator";

export function useLogOut(): () => void {
  const client = useQueryClient();
  return useCallback(() => {
    void remove("/session").finally(() => client.resetQueries());
  }, [client]);
}
