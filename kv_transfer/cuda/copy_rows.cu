// The paged copy: rows of KV from blocks or staging into blocks or staging, one kernel.
//
// From Hopper on each thread block keeps a ring of tiles under way with bulk copies (PTX
// cp.async.bulk): one warp loads tiles into shared memory, one stores them from there, so the
// multiprocessor's registers and issue slots stay free for the kernels beside it. TILE is the size
// of a tile in bytes, SLOTS the number of them.
//
// Two more kernels convert on the way: numbers to e4m3 codes, and codes to numbers. NUMBER says what
// numbers are: 0 bfloat16, 1 float16, 2 float32.

typedef unsigned long long u64;
typedef unsigned int u32;

#define STORES (SLOTS / 2)  // that may still be reading their tile

// One side. The n-th cell begins at page pages[n], or n itself without pages. Strides in bytes.
struct Rows {
    char* base;
    const int* pages;
    long long layer, page, half, head;
};

// Rows of `run` bytes in `tiles` tiles of `tile` bytes, which makes so many chunks in all.
struct Size {
    int cells, halves, heads, run, tile, tiles, chunks;
};

// Where a chunk begins; chunks are counted [layer][cell][half][head][tile]. item: bytes of a unit of
// Size.run and Size.tile.
static __device__ char* begin(const Rows& rows, const Size& size, int chunk, int item = 1) {
    int tile = chunk % size.tiles, row = chunk / size.tiles;
    int head = row % size.heads;
    row /= size.heads;
    int half = row % size.halves;
    row /= size.halves;
    int cell = row % size.cells, layer = row / size.cells;
    long long page = rows.pages ? rows.pages[cell] : cell;
    return rows.base + layer * rows.layer + page * rows.page + half * rows.half +
           head * rows.head + (long long)tile * size.tile * item;
}

static __device__ u32 bytes(const Size& size, int chunk) {
    int left = size.run - chunk % size.tiles * size.tile;
    return left < size.tile ? left : size.tile;
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

// ---- conversion ----------------------------------------------------------------------------------

#if NUMBER == 2
typedef u32 Bits;
#else
typedef unsigned short Bits;
#endif
typedef unsigned char u8;

union Word {
    u32 bits;
    float number;
};

static __device__ float number_of(Bits bits) {
    Word word;
#if NUMBER == 1
    word.bits = (u32)(bits & 0x7fff) << 13;  // the exponent's bias is 15, not 127
    word.number *= 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00) word.bits |= 0x7f800000;
    word.bits |= (u32)(bits & 0x8000) << 16;
#else
    word.bits = NUMBER == 0 ? (u32)bits << 16 : bits;
#endif
    return word.number;
}

// To nearest, ties to even, at most 448; not a number stays one.
static __device__ u32 code_of(float number) {
    Word word = {0};
    word.number = number;
    u32 sign = word.bits >> 24 & 0x80, size = word.bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7f;
    if (size < 121u << 23) {  // below 2^-6 codes count 2^-9
        word.bits = size;
        word.number += 0x1p14f;  // the last bit of the sum is 2^-9
        return sign | (word.bits - (141u << 23));
    }
    u32 code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    return sign | (code < 0x7e ? code : 0x7e);
}

// Two numbers: the code of the first in the low byte.
static __device__ u32 codes_of(float first, float second) {
#if __CUDA_ARCH__ >= 890
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    // What is no number keeps its sign: checksums of codes and of what was made of them are equal.
    Word one, other;
    one.number = first, other.number = second;
    u32 none = (first != first ? one.bits >> 24 & 0x80 : 0) |
               (second != second ? other.bits >> 16 & 0x8000 : 0);
    return codes | none;
#else
    return code_of(first) | code_of(second) << 8;
#endif
}

// What a code means has few bits: all types of numbers have it exactly.
static __device__ Bits bits_of(u32 code) {
    Word word = {(code & 0x7f) << 20};
    word.number *= 0x1p120f;  // the exponent's bias is 7, not 127
    u32 sign = code >> 7, size = word.bits;
    bool none = (code & 0x7f) == 0x7f;
#if NUMBER == 2
    return sign << 31 | (none ? 0x7fc00000 : size);
#elif NUMBER == 1
    word.number *= 0x1p-112f;
    return sign << 15 | (none ? 0x7e00 : word.bits >> 13);
#else
    return sign << 15 | (none ? 0x7fc0 : size >> 16);
#endif
}

#define MANY 16   // values that a thread takes at a time
#define AHEAD 4   // times, whose loads are on their way together

template <class T>
struct __align__(16) Values {
    T at[MANY];
};

static __device__ void convert(const Values<Bits>& from, Values<u8>& to) {
    for (int i = 0; i < MANY; i += 2) {
        u32 codes = codes_of(number_of(from.at[i]), number_of(from.at[i + 1]));
        to.at[i] = codes, to.at[i + 1] = codes >> 8;
    }
}

static __device__ void convert(const Values<u8>& from, Values<Bits>& to) {
    for (int i = 0; i < MANY; i++) to.at[i] = bits_of(from.at[i]);
}

// Any number of threads a block; sizes count values.
template <class From, class To>
static __device__ void convert_rows(const Rows& source, const Rows& target, const Size& size) {
    for (int chunk = blockIdx.x; chunk < size.chunks; chunk += gridDim.x) {
        const Values<From>* from = (const Values<From>*)begin(source, size, chunk, sizeof(From));
        Values<To>* to = (Values<To>*)begin(target, size, chunk, sizeof(To));
        u32 count = bytes(size, chunk) / MANY, step = blockDim.x;
        for (u32 first = threadIdx.x; first < count; first += AHEAD * step) {
            Values<From> some[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++)
                if (first + i * step < count) some[i] = from[first + i * step];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                if (first + i * step >= count) break;
                Values<To> made;
                convert(some[i], made);
                to[first + i * step] = made;
            }
        }
    }
}

extern "C" __global__ void narrow_rows(
    const __grid_constant__ Rows source, const __grid_constant__ Rows target,
    const __grid_constant__ Size size) {
    convert_rows<Bits, u8>(source, target, size);
}

extern "C" __global__ void widen_rows(
    const __grid_constant__ Rows source, const __grid_constant__ Rows target,
    const __grid_constant__ Size size) {
    convert_rows<u8, Bits>(source, target, size);
}
