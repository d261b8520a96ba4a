// A streamed completion over gRPC: go run . localhost:9000 Once upon a time
//
// The code of protocol/wire/inference.proto comes first (docs/grpc.md).
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	batonv1 "baton/v1"
)

// A call that fails before its first message is tried again; the router says why in trailers.
const retries = `{"methodConfig": [{
	"name": [{"service": "baton.v1.Inference"}],
	"retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "5s",
		"backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]}}]}`

func main() {
	conn, err := grpc.Dial(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(retries))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if key := os.Getenv("BATON_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	stream, err := batonv1.NewInferenceClient(conn).Generate(ctx, &batonv1.GenerateRequest{
		Input:     &batonv1.GenerateRequest_Prompt{Prompt: strings.Join(os.Args[2:], " ")},
		MaxTokens: proto.Int64(32),
	})
	if err != nil {
		log.Fatal(err)
	}
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			log.Fatalf("%s: %s (field %v)", status.Code(err), status.Convert(err).Message(),
				stream.Trailer().Get("baton-error-param"))
		}
		for _, choice := range message.Choices {
			fmt.Print(choice.Text)
		}
		if message.Usage != nil {
			fmt.Printf("\n[%d tokens]\n", message.Usage.TotalTokens)
		}
	}
}
