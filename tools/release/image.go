package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/distribution/reference"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// imageUser is the user and the group of the program in the image. With runAsNonRoot, kubelet refuses an image whose
// user is a name. Other images without a shell, such as distroless ones, have 65532 too.
const imageUser = "65532:65532"

// Annotations by which an import finds the name of an image in an OCI layout: containerd's own, and that of the
// OCI image specification, which holds the tag alone.
const (
	containerdName = "io.containerd.image.name"
	ociTag         = "org.opencontainers.image.ref.name"
)

// addImages writes the image: a tar with the OCI layout of all platforms, and for each platform a tar as `docker
// save` writes it. All of them are named tunnel:VERSION.
func (r *release) addImages(programs []*program, docs documents) error {
	tag, err := name.NewTag("tunnel:" + r.version)
	if err != nil {
		return err
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	some := false
	for _, p := range programs {
		if p.os != "linux" {
			continue
		}
		img, err := r.image(p, docs.license)
		if err != nil {
			return err
		}
		config, err := img.ConfigFile()
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if err = tarball.Write(tag, img, &b); err != nil {
			return err
		}
		if err = r.put(r.name("image_"+p.String()+".tar"), b.Bytes()); err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: img, Descriptor: v1.Descriptor{Platform: config.Platform()},
		})
		some = true
	}
	if !some {
		return nil
	}
	return r.addLayout(index)
}

// image assembles the image for p. It holds the program, the CNI plugin, which `tunnel cni install` copies to the
// node, and the licences. The licences of most
// modules in the program demand that their texts accompany it. The layer names the folder, so that whoever unpacks
// the layer lets every user enter the folder.
func (r *release) image(p *program, license []byte) (v1.Image, error) {
	layer, err := layerOf([]file{
		{name: "licenses/"},
		{name: "licenses/LICENSE", data: license},
		{name: "licenses/NOTICES", data: p.notices},
		{name: "tunnel", executable: true, data: p.data},
		{name: pluginName, executable: true, data: p.plugin},
	}, r.time)
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.Append(img, mutate.Addendum{
		Layer:   layer,
		History: v1.History{Created: v1.Time{Time: r.time}, CreatedBy: "tools/release", Comment: "tunnel " + r.version},
	})
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Created = v1.Time{Time: r.time}
	config.OS, config.Architecture = p.os, p.arch
	if p.arch == "arm" {
		config.Variant = "v" + armVersion
	}
	config.Config = v1.Config{
		User:       imageUser,
		Entrypoint: []string{"/tunnel"},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":       "tunnel",
			"org.opencontainers.image.description": "reach edge nodes behind NAT",
			"org.opencontainers.image.version":     r.version,
			"org.opencontainers.image.revision":    r.commit,
			"org.opencontainers.image.created":     r.time.Format(time.RFC3339),
			"org.opencontainers.image.licenses":    "Apache-2.0",
		},
	}
	return mutate.ConfigFile(img, config)
}

// layerOf returns a layer with files.
func layerOf(files []file, at time.Time) (v1.Layer, error) {
	var b bytes.Buffer
	if err := writeTar(&b, files, at); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer),
		tarball.WithCompressionLevel(gzip.BestCompression), tarball.WithCompressedCaching)
}

// addLayout writes the index as a tar of an OCI layout.
func (r *release) addLayout(index v1.ImageIndex) error {
	// containerd compares names as they are, so the image needs the full form that kubelet asks for.
	full, err := reference.ParseNormalizedNamed("tunnel:" + r.version)
	if err != nil {
		return err
	}
	named := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add: index,
		Descriptor: v1.Descriptor{
			Annotations: map[string]string{containerdName: full.String(), ociTag: r.version},
		},
	})
	dir := filepath.Join(r.work, "layout")
	if _, err = layout.Write(dir, named); err != nil {
		return err
	}
	files, err := filesBelow(dir)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err = writeTar(&b, files, r.time); err != nil {
		return err
	}
	return r.put(r.name("image.tar"), b.Bytes())
}

// filesBelow returns the files in a folder and in the folders below.
func filesBelow(dir string) ([]file, error) {
	var files []file
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		relative, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		files = append(files, file{name: filepath.ToSlash(relative), data: data})
		return err
	})
	return files, err
}
