// Command protobuf writes NAME.pb.go and NAME_grpc.pb.go beside NAME.proto, for each folder that it is given. It
// needs no protoc: protocompile parses, and the two plugins run from the module proxy. It is a module of its own,
// so that the tunnel does not depend on it. Run it by `make gen`.
package main

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// The plugins are pinned; the versions are those of the main module's runtime.
const (
	messagePlugin = "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12"
	grpcPlugin    = "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: protobuf DIR..., where each DIR holds one file NAME.proto")
	}
	for _, dir := range os.Args[1:] {
		if err := generate(dir); err != nil {
			log.Fatalf("protobuf: %s: %v", dir, err)
		}
	}
}

func generate(dir string) error {
	sources, err := filepath.Glob(filepath.Join(dir, "*.proto"))
	if err != nil {
		return err
	}
	if len(sources) != 1 {
		return fmt.Errorf("there are %d files *.proto, and not one", len(sources))
	}
	source := filepath.Base(sources[0])
	compiler := protocompile.Compiler{
		Resolver:       &protocompile.SourceResolver{ImportPaths: []string{dir}},
		SourceInfoMode: protocompile.SourceInfoStandard, // comments reach the Go code
	}
	files, err := compiler.Compile(context.Background(), source)
	if err != nil {
		return err
	}
	request := &pluginpb.CodeGeneratorRequest{
		FileToGenerate: []string{source},
		Parameter:      proto.String("paths=source_relative"),
	}
	var descriptors []*descriptorpb.FileDescriptorProto
	for _, f := range files {
		descriptors = append(descriptors, protoutil.ProtoFromFileDescriptor(f))
	}
	request.ProtoFile = descriptors
	input, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	for _, plugin := range []string{messagePlugin, grpcPlugin} {
		if err := run(plugin, input, dir); err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
	}
	return nil
}

// run gives the request to a plugin and writes the files that it answers with.
func run(plugin string, input []byte, dir string) error {
	cmd := exec.Command("go", "run", plugin)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(input), os.Stderr
	output, err := cmd.Output()
	if err != nil {
		return err
	}
	var response pluginpb.CodeGeneratorResponse
	if err = proto.Unmarshal(output, &response); err != nil {
		return err
	}
	if response.Error != nil {
		return fmt.Errorf("%s", *response.Error)
	}
	for _, f := range response.File {
		if err := os.WriteFile(filepath.Join(dir, f.GetName()), []byte(f.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
