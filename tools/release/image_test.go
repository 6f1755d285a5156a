package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// dockerImage reads the image of an architecture from a tar of docker save.
func dockerImage(t *testing.T, dir, arch string) v1.Image {
	t.Helper()
	tag, err := name.NewTag("tunnel:v0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(filepath.Join(dir, "tunnel_v0.1.0_image_linux_"+arch+".tar"), &tag)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// ociIndex reads the images of all architectures from the tar of an OCI layout. It checks how the image is named.
func ociIndex(t *testing.T, dir string) v1.ImageIndex {
	t.Helper()
	to := t.TempDir()
	for _, f := range unpack(t, bytes.NewReader(read(t, dir, "tunnel_v0.1.0_image.tar"))) {
		write(t, to, f.name, string(f.data))
	}
	outer, err := layout.ImageIndexFromPath(to)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := outer.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(manifest.Manifests) != 1 {
		t.Fatalf("the layout has %d images, want 1", len(manifest.Manifests))
	}
	named := manifest.Manifests[0]
	// kubelet asks for the image tunnel:v0.1.0 of a manifest by this full name.
	fullName := regexp.MustCompile(`^[a-z.]+/library/tunnel:v0\.1\.0$`)
	if full := named.Annotations[containerdName]; !fullName.MatchString(full) {
		t.Errorf("name for containerd: %q", full)
	}
	if tag := named.Annotations[ociTag]; tag != "v0.1.0" {
		t.Errorf("tag: %q", tag)
	}
	index, err := outer.ImageIndex(named.Digest)
	if err != nil {
		t.Fatal(err)
	}
	return index
}

// checkImage checks an image, of which the layer's hashes too, and that it holds the program, the plugin and the
// licences, and nothing else.
func checkImage(t *testing.T, img v1.Image, arch, variant string, program, plugin, license, notices []byte) {
	t.Helper()
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.OS != "linux" || config.Architecture != arch || config.Variant != variant {
		t.Errorf("image for %s/%s/%s", config.OS, config.Architecture, config.Variant)
	}
	if config.Created.Unix() != commitTime {
		t.Errorf("image of %s", config.Created)
	}
	c := config.Config
	if c.User != "65532:65532" || !slices.Equal(c.Entrypoint, []string{"/tunnel"}) || c.WorkingDir != "/" {
		t.Errorf("configuration %+v", c)
	}
	if c.Cmd != nil || c.Env != nil {
		t.Errorf("arguments %q, environment %q", c.Cmd, c.Env)
	}
	for label, want := range map[string]string{
		"version": "v0.1.0", "licenses": "Apache-2.0", "created": "2001-09-09T01:46:40Z", "title": "tunnel",
	} {
		if got := c.Labels["org.opencontainers.image."+label]; got != want {
			t.Errorf("label %s: %q, want %q", label, got, want)
		}
	}
	if revision := c.Labels["org.opencontainers.image.revision"]; len(revision) != 40 {
		t.Errorf("label revision: %q", revision)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) != 1 {
		t.Fatalf("%d layers", len(layers))
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	files := unpack(t, content)
	want := []string{"licenses/", "licenses/LICENSE", "licenses/NOTICES", "tunnel", "tunnel-cni"}
	if got := names(t, files); !slices.Equal(got, want) {
		t.Fatalf("the image holds %q, want %q", got, want)
	}
	for i, data := range [][]byte{nil, license, notices, program, plugin} {
		if !bytes.Equal(files[i].data, data) {
			t.Errorf("/%s holds another text", files[i].name)
		}
		if files[i].executable != strings.HasPrefix(files[i].name, "tunnel") {
			t.Errorf("/%s: executable %t", files[i].name, files[i].executable)
		}
	}
}

func TestImage(t *testing.T) {
	e := amd64(t)
	const dir = "tunnel_v0.1.0_linux_amd64/"
	files := archived(t, e)
	program, plugin := dataOf(t, files, dir+"tunnel"), dataOf(t, files, dir+"tunnel-cni")
	license, notices := dataOf(t, files, dir+"LICENSE"), dataOf(t, files, dir+"NOTICES")
	docker := dockerImage(t, e.dir, "amd64")
	checkImage(t, docker, "amd64", "", program, plugin, license, notices)
	index := ociIndex(t, e.dir)
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 {
		t.Fatalf("%+v, %v", manifest, err)
	}
	oci, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	checkImage(t, oci, "amd64", "", program, plugin, license, notices)
	one, err := docker.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	if other, err := oci.ConfigName(); err != nil || one != other {
		t.Errorf("two images: %s and %s, %v", one, other, err)
	}
}

func TestImageForAllPlatforms(t *testing.T) {
	r := small(t)
	var programs []*program
	for _, p := range every() {
		programs = append(programs, fakeProgram(p.os, p.arch))
	}
	if err := r.addImages(programs, fakeDocuments()); err != nil {
		t.Fatal(err)
	}
	index := ociIndex(t, r.dir)
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if manifest.MediaType != types.OCIImageIndex {
		t.Errorf("media type %s", manifest.MediaType)
	}
	var platforms []string
	for _, m := range manifest.Manifests {
		platforms = append(platforms, m.Platform.String())
		img, err := index.Image(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range []v1.Image{img, dockerImage(t, r.dir, m.Platform.Architecture)} {
			checkImage(t, one, m.Platform.Architecture, m.Platform.Variant,
				[]byte("program "+m.Platform.Architecture), []byte("plugin "+m.Platform.Architecture), []byte("l"), []byte("n"))
		}
	}
	if want := []string{"linux/amd64", "linux/arm64", "linux/arm/v7"}; !slices.Equal(platforms, want) {
		t.Errorf("platforms %q, want %q", platforms, want)
	}
}

// TestDockerfile holds the Dockerfile to the image that a release assembles.
func TestDockerfile(t *testing.T) {
	text := string(read(t, "../../deployment/image/Dockerfile"))
	last := text[strings.LastIndex(text, "\nFROM "):]
	want := "\nFROM scratch\nCOPY --from=build /src/bin/tunnel /src/bin/tunnel-cni /\n" +
		"COPY --from=build /src/bin/licenses /licenses\n" +
		"USER " + imageUser + "\nENTRYPOINT [\"/tunnel\"]\n"
	if last != want {
		t.Errorf("the last stage is\n%s\nwant\n%s", last, want)
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(read(t, "../../go.mod"))
	if version == nil || !strings.Contains(text, fmt.Sprintf("\nFROM golang:%s AS build\n", version[1])) {
		t.Errorf("the Dockerfile builds with another Go than go.mod asks for: %s", version)
	}
}

// TestDockerfileLicences runs the Dockerfile's command that builds, in a tree without a repository, as an archive of
// the sources is one. The command must write the licences of the release's image.
func TestDockerfileLicences(t *testing.T) {
	runsHere(t)
	e := amd64(t)
	root := t.TempDir()
	names, err := tracked(t.Context(), e.root)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err = copyFile(filepath.Join(e.root, name), filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	command := regexp.MustCompile(`(?m)^RUN (make build (?:.*\\\n)*.*)$`).FindSubmatch(
		read(t, root, "deployment/image/Dockerfile"))
	if command == nil {
		t.Fatal("the Dockerfile has no RUN make build")
	}
	env := append(os.Environ(), "VERSION="+testVersion)
	if _, err = output(t.Context(), root, env, "sh", "-euc", string(command[1])); err != nil {
		t.Fatal(err)
	}
	files := archived(t, e)
	for _, name := range []string{"LICENSE", "NOTICES"} {
		path := filepath.Join(root, "bin/licenses", name)
		if !bytes.Equal(read(t, path), dataOf(t, files, "tunnel_v0.1.0_linux_amd64/"+name)) {
			t.Errorf("the Dockerfile's %s differs from the release's", name)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o644 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

// TestContainerd imports the image into a containerd as it runs on Kubernetes' nodes.
func TestContainerd(t *testing.T) {
	daemon, client := containerd(t)
	e := amd64(t)
	for _, tar := range []string{"tunnel_v0.1.0_image.tar", "tunnel_v0.1.0_image_linux_amd64.tar"} {
		t.Run(tar, func(t *testing.T) {
			ctr := startContainerd(t, daemon, client)
			if out, err := ctr("images", "import", filepath.Join(e.dir, tar)); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			out, err := ctr("images", "list", "-q")
			if err != nil || !strings.HasSuffix(strings.TrimSpace(out), "/library/tunnel:v0.1.0") {
				t.Errorf("images: %q, %v", out, err)
			}
			if out, err = ctr("images", "check"); err != nil || !strings.Contains(out, "complete (") {
				t.Errorf("check: %q, %v", out, err)
			}
		})
	}
}

// containerd returns the paths of containerd and ctr: those that are installed, or those of `make e2e`. It skips the
// test if there are none.
func containerd(t *testing.T) (daemon, client string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containerd runs as root only")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	find := func(program string) string {
		if path, err := exec.LookPath(program); err == nil {
			return path
		}
		path := filepath.Join(cache, "tunnel-e2e", "debroot", "usr", "bin", program)
		if _, err := os.Stat(path); err != nil {
			t.Skipf("there is no %s: neither installed nor in %s", program, path)
		}
		return path
	}
	return find("containerd"), find("ctr")
}

// startContainerd starts a containerd in a folder of its own, and returns a function that runs ctr.
func startContainerd(t *testing.T, daemon, client string) (ctr func(args ...string) (string, error)) {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\n"+
		"disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = %q\n",
		filepath.Join(dir, "root"), filepath.Join(dir, "state"), filepath.Join(dir, "c.sock"))
	write(t, dir, "config.toml", config)
	var log bytes.Buffer
	cmd := exec.Command(daemon, "--config", filepath.Join(dir, "config.toml"))
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Logf("containerd: %v\n%s", err, log.String())
		}
	})
	ctr = func(args ...string) (string, error) {
		args = append([]string{"--address", filepath.Join(dir, "c.sock"), "-n", "k8s.io"}, args...)
		out, err := exec.Command(client, args...).CombinedOutput()
		return string(out), err
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		out, err := ctr("version")
		if err == nil {
			return ctr
		}
		if time.Now().After(deadline) {
			t.Fatalf("containerd does not answer: %v\n%s", err, out)
		}
	}
}
