"""The transport with hivemind: a DHT of peer records, and averaging rounds in which payloads are exchanged.

Only this package imports hivemind. Its processes::

    main --starts--> host --forks--> DHT --runs--> p2pd (libp2p)
                          --forks--> averager of stage 0, of stage 1, ...

hivemind must fork its processes before gRPC, CUDA or an event loop exist in the forking process. So the main
process (:mod:`.transport` and :mod:`.host_process`, which never import hivemind) starts a separate host
(:mod:`.host`). The host forks one averager for each hosted stage (:mod:`.averager`), which keeps hivemind's
peer-to-peer layer, matchmaking and step, and replaces its dense all-reduce by an all-gather of payload bytes.

Payload bytes and calls (:mod:`.calls`) travel over socket pairs (node.ipc.channel), not over hivemind's
control pipes, which carry at most 16 KiB. When any of these processes dies, the host ends all of them and
itself, and the main process starts them again. When the main process dies, the socket of
the host closes; when the host dies, its children see that their parent has changed (:mod:`.lifetime`). All
socket files are in one temporary folder, which the last process removes.
"""

import os
import sys

if sys.platform == "linux":
    # Read when hivemind is imported. Memory that its futures share by name would outlive a killed process.
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
