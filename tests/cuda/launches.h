// What a graph holds.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

/// Kernels and copies of a graph that records such work, and how many begin while the one before
/// runs.
struct Launches {
  std::size_t all = 0, early = 0;

  Launches(Stream stream, const std::function<void()>& work) {
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    EXPECT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    work();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &all), cudaSuccess);
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

}  // namespace fusedmoe::testing
