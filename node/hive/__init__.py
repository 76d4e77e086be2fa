"""hivemind: the DHT of peer records, and the averaging rounds in which payloads are exchanged.

The only room that imports hivemind. Its processes::

    main --spawns--> host --forks--> DHT --runs--> p2pd (libp2p)
                          --forks--> averager of stage 0, of stage 1, ...

hivemind must fork its processes before gRPC, CUDA or an event loop exist in the process that forks. So the
main process (:mod:`.client`, no hivemind) spawns a clean one that does nothing else (:mod:`.host`). The host
forks one averager for each hosted stage (:mod:`.averager`), which keeps hivemind's peer-to-peer layer,
matchmaking and step, and replaces its dense all-reduce by an all-gather of payload bytes.

Payload bytes and calls travel over socket pairs (node.ipc.channel), not over hivemind's control pipes, which
carry at most 16 KiB. Failing is simple: when any of these processes dies, the host ends all of them and
itself, and the main process sees HIVEMIND_DIED. When the main process dies, the host sees its socket close;
when the host dies, its children see that their parent changed (:mod:`.lifetime`). Every socket file lives in
one temporary folder, which the last one removes.
"""
