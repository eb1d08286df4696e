// Who is logged in, and the word that each change must carry along with the session's cookie.
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useCallback } from "react";
import { get, remove, setChangeWord } from "./client";

export interface Session {
  name: string | null;
  role: "reader" | "operator" | null;
  csrf: string | null;
  version: string;
}

async function ask(): Promise<Session> {
  const told = await get<Session>("/session");
  setChangeWord(told.csrf);
  return told;
}

export const isStranger = (session: Session | undefined): boolean =>
  session !== undefined && session.name === null;

export const useSession = () =>
  useQuery({ queryKey: ["session"], queryFn: ask, staleTime: Number.POSITIVE_INFINITY });

/** Whether whoever looks may change anything; the server decides, this greys out buttons. */
export const useMayAct = (): boolean => (useSession().data?.role ?? "operator") === "operator";

export function useLogOut(): () => void {
  const client = useQueryClient();
  return useCallback(() => {
    void remove("/session").finally(() => client.resetQueries());
  }, [client]);
}
