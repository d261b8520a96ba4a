"""Pure parts of the hand-off: values and times in, decisions out.

- reshard: which heads go from which rank to which, in how large pieces
- coverage: which layers of which cells were named
- checksum: of messages, and of a whole hand-off
- states: life cycles of grants, pieces, pool accesses and links
- channel: the protocol of incarnations and turns
- block_grants: decode's blocks under generations
- handoff_state: the life of one hand-off, on prefill and on decode
"""
