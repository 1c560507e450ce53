"""Every bound of the HTTP server, with its unit and the reason for its number."""

from __future__ import annotations

import msgspec

KIB, MIB = 2**10, 2**20


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and rules of one server; the defaults suit one machine and a few users.

    api_key           what clients must show; empty: nobody is asked
    hosts             names that a Host header may give; empty: any.  A loopback server names its
                      own, so that no web page reaches it under a name of its choice
    origins           origins of web pages that may call, beside the server's own
    head_bytes_max    request line and headers; browsers with many cookies send 8 KiB
    head_s            from a connection's start, or the answer before, to a whole head
    keep_alive_s      idle time of a connection between requests
    connections_max   open connections; below the usual limit of 1,024 file descriptors
    requests_max      requests in the server at once, those that only read figures included
    body_bytes_max    a body; a million tokens as JSON integers take 8 MiB
    body_s            from the head to the whole body; a slow line brings 16 MiB in a minute
    request_s         a request altogether; a long answer on a slow CPU takes most of an hour
    write_stall_s     time that a reader may let a chunk lie before its connection is cut
    heartbeat_s       silence after which a stream sends a comment; proxies cut at 30 to 60 s
    choices_max       completions of one call (prompts times ``n``)
    tools_max         tools of one call; agents come to some hundreds
    token_ids_max     ids of one ``/detokenize``
    encoders_max      chats and texts that are tokenised at once, each on a thread
    readers_max       long bodies that are read at once, each on a thread; more would only wait for
                      each other
    retry_after_s     what a refused client is told to wait
    history_requests  finished requests that the status page looks back on
    watchers_max      status pages that follow live at once
    watch_s           pause between two updates of a status page
    tick_s            period of the loop-lag ticker; 20 a second cost nothing to notice
    """

    api_key: str = ""
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    head_bytes_max: int = 32 * KIB
    head_s: float = 15.0
    keep_alive_s: float = 15.0
    connections_max: int = 768
    requests_max: int = 512
    body_bytes_max: int = 16 * MIB
    body_s: float = 60.0
    request_s: float = 3600.0
    write_stall_s: float = 30.0
    heartbeat_s: float = 5.0
    choices_max: int = 16
    tools_max: int = 512
    token_ids_max: int = 2**20
    encoders_max: int = 2
    readers_max: int = 1
    retry_after_s: int = 2
    history_requests: int = 512
    watchers_max: int = 16
    watch_s: float = 1.0
    tick_s: float = 0.05
