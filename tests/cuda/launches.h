// What a graph holds.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "peer_ranks.h"

namespace fusedmoe::testing {

/// Kernels and copies of a graph that records such work, how many begin while the one before runs,
/// and which kernels they are, sorted.
struct Launches {
  std::size_t all = 0, early = 0;
  std::vector<const void*> kernels;

  Launches(Stream stream, const std::function<void()>& work) {
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    EXPECT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    work();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &all), cudaSuccess);
    std::vector<cudaGraphNode_t> nodes(all);
    EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &all), cudaSuccess);
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      EXPECT_EQ(cudaGraphNodeGetType(node, &type), cudaSuccess);
      if (type != cudaGraphNodeTypeKernel) continue;
      cudaKernelNodeParams params{};
      EXPECT_EQ(cudaGraphKernelNodeGetParams(node, &params), cudaSuccess);
      kernels.push_back(params.func);
    }
    std::sort(kernels.begin(), kernels.end());
#if CUDART_VERSION >= 13000
    const auto get_edges = cudaGraphGetEdges;
#else
    const auto get_edges = cudaGraphGetEdges_v2;
#endif
    std::size_t count = 0;
    EXPECT_EQ(get_edges(graph, nullptr, nullptr, nullptr, &count), cudaSuccess);
    std::vector<cudaGraphNode_t> from(count), to(count);
    std::vector<cudaGraphEdgeData> edges(count);
    EXPECT_EQ(get_edges(graph, from.data(), to.data(), edges.data(), &count), cudaSuccess);
    for (const cudaGraphEdgeData& edge : edges) {
      early += edge.type == cudaGraphDependencyTypeProgrammatic;
    }
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
};

using Kernels = std::vector<const void*>;

/// Those of a step of all ranks on one GPU, with so many tokens at most.
inline Kernels kernels_of(const std::vector<std::unique_ptr<MoeLayer>>& layers,
                          const std::vector<PeerBuffers>& buffers, std::int64_t most) {
  const OwnedStream stream(layers[0]->config().device);
  ForwardOptions options;
  options.stream = stream;
  options.max_tokens = most;
  return Launches(stream, [&] { run_all(layers, buffers, options); }).kernels;
}

}  // namespace fusedmoe::testing
