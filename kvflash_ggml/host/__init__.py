"""Page images off the device: memory, spill files, and which chunk has which.

A page image is raw cache bytes of 64 tokens, all layers in their order. `PageHeap` owns all images of one model, in
page-locked slabs, in an unnamed file, or still in the file that they come from. `HostStore` says which chunk of one
text has which image.

Addresses are valid during a lease, and until the transfers of the lease are done. Any thread may call; no lock leaves
the room. The room knows neither the engine nor a text: memory comes from whatever implements `HostMemory`.
"""
