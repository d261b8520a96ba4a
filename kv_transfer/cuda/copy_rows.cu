// The paged copy: rows of KV from blocks or staging into blocks or staging, one kernel.
//
// From Hopper on each thread block keeps a ring of tiles under way with bulk copies (PTX
// cp.async.bulk): one warp loads tiles into shared memory, one stores them from there, so the
// multiprocessor's registers and issue slots stay free for the kernels beside it. TILE is the size
// of a tile in bytes, SLOTS the number of them.

typedef unsigned long long u64;
typedef unsigned int u32;

#define STORES (SLOTS / 2)  // that may still be reading their tile

// One side. The n-th cell begins at page pages[n], or n itself without pages. Strides in bytes.
struct Rows {
    char* base;
    const int* pages;
    long long layer, page, half, head;
};

// Rows of `run` bytes in `tiles` tiles, which makes so many chunks in all.
struct Size {
    int cells, halves, heads, run, tiles, chunks;
};

// Where a chunk begins; chunks are counted [layer][cell][half][head][tile].
static __device__ char* begin(const Rows& rows, const Size& size, int chunk) {
    int tile = chunk % size.tiles, row = chunk / size.tiles;
    int head = row % size.heads;
    row /= size.heads;
    int half = row % size.halves;
    row /= size.halves;
    int cell = row % size.cells, layer = row / size.cells;
    long long page = rows.pages ? rows.pages[cell] : cell;
    return rows.base + layer * rows.layer + page * rows.page + half * rows.half +
           head * rows.head + (long long)tile * TILE;
}

static __device__ u32 bytes(const Size& size, int chunk) {
    int left = size.run - chunk % size.tiles * TILE;
    return left < TILE ? left : TILE;
}

#if __CUDA_ARCH__ >= 900

static __device__ u32 shared_address(const void* at) {
    return (u32)__cvta_generic_to_shared(at);
}

static __device__ void wait(const u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

static __device__ void arrive(const u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

static __device__ void load(char* tile, const char* from, u32 size, const u64* full) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(full)),
                 "r"(size)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(tile)),
        "l"(from), "r"(size), "r"(shared_address(full))
        : "memory");
}

static __device__ void store(char* to, const char* tile, u32 size) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(tile)), "r"(size)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Two warps a block.
extern "C" __global__ void copy_rows(
    const __grid_constant__ Rows source, const __grid_constant__ Rows target,
    const __grid_constant__ Size size) {
    extern __shared__ __align__(128) char ring[];
    __shared__ u64 full[SLOTS], empty[SLOTS];
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + slot)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(empty + slot)));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    bool loads = threadIdx.x < 32;
    int lane = threadIdx.x % 32, step = gridDim.x, count = 0;
    u64 ahead = 0;
    for (int chunk = blockIdx.x; chunk < size.chunks; chunk += step, count++) {
        if (count % 32 == 0) {  // the lanes look up the pages of the next 32 chunks at once
            long long mine = chunk + (long long)lane * step;
            if (mine < size.chunks) ahead = (u64)begin(loads ? source : target, size, (int)mine);
        }
        char* at = (char*)__shfl_sync(0xffffffff, ahead, count % 32);
        int slot = count % SLOTS;
        u32 round = count / SLOTS;
        char* tile = ring + slot * TILE;
        if (lane == 0 && loads) {
            wait(empty + slot, ~round & 1);
            load(tile, at, bytes(size, chunk), full + slot);
        } else if (lane == 0) {
            wait(full + slot, round & 1);
            store(at, tile, bytes(size, chunk));
            asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STORES) : "memory");
            if (count >= STORES) arrive(empty + (count - STORES) % SLOTS);
        }
        __syncwarp();
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#else

// Any number of threads a block.
extern "C" __global__ void copy_rows(
    const __grid_constant__ Rows source, const __grid_constant__ Rows target,
    const __grid_constant__ Size size) {
    for (int chunk = blockIdx.x; chunk < size.chunks; chunk += gridDim.x) {
        const uint4* from = (const uint4*)begin(source, size, chunk);
        uint4* to = (uint4*)begin(target, size, chunk);
        for (u32 at = threadIdx.x; at < bytes(size, chunk) / sizeof(uint4); at += blockDim.x)
            to[at] = from[at];
    }
}

#endif
